"""Products with a quantised matrix."""

from shardlib.kernels.quantized_matmul.matrix import QuantizedMatrix
from shardlib.kernels.quantized_matmul.op import quantized_matmul

__all__ = ["QuantizedMatrix", "quantized_matmul"]

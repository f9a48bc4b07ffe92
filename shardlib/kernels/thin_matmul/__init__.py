"""Products of few rows with weights as they lie in memory."""

from shardlib.kernels.thin_matmul.linear import Linear
from shardlib.kernels.thin_matmul.matrix import QuantizedMatrix
from shardlib.kernels.thin_matmul.op import thin_matmul

__all__ = ["Linear", "QuantizedMatrix", "thin_matmul"]

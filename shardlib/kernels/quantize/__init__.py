"""Blockwise int8 and int4 quantisation of flat buffers."""

from shardlib.kernels.quantize.blockwise import Blockwise
from shardlib.kernels.quantize.op import dequantize, dequantize_sum, dequantize_sum_quantize, quantize

__all__ = ["Blockwise", "dequantize", "dequantize_sum", "dequantize_sum_quantize", "quantize"]

"""Products of ranges of rows with a matrix each: one for every expert."""

from shardlib.kernels.grouped_matmul.op import grouped_matmul

__all__ = ["grouped_matmul"]

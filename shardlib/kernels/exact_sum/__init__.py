"""Exact sums, which depend neither on the order of additions nor on how they are divided among ranks."""

from shardlib.kernels.exact_sum.op import digits_of_squares

__all__ = ["digits_of_squares"]

"""Sums of squares, which global norms are made of, with the check for what is not finite."""

from shardlib.kernels.global_norm.op import sum_of_squares

__all__ = ["sum_of_squares"]

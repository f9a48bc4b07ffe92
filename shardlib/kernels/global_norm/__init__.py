"""Sums of squares, which global norms are made of, with the check for what is not finite."""

from shardlib.kernels.global_norm.op import implementation, sum_of_squares

__all__ = ["implementation", "sum_of_squares"]

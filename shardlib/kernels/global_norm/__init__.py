"""Sums of squares, for global norms and for the check that gradients are finite."""

from shardlib.kernels.global_norm.op import sum_of_squares

__all__ = ["sum_of_squares"]

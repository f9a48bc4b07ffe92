"""Masked, scaled softmax."""

from shardlib.kernels.softmax.op import softmax

__all__ = ["softmax"]

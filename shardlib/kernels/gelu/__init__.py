"""Bias + GeLU."""

from shardlib.kernels.gelu.op import gelu

__all__ = ["gelu"]

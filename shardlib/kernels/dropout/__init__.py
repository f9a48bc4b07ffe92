"""Dropout whose mask is computed from a counter, with a bias before it and a residual after it."""

from shardlib.kernels.dropout.arguments import Draw
from shardlib.kernels.dropout.op import dropout

__all__ = ["Draw", "dropout"]

"""Dropout whose mask is computed from a counter, with a bias before it and a residual after it."""

from shardlib.kernels.dropout.op import Draw, dropout

__all__ = ["Draw", "dropout"]

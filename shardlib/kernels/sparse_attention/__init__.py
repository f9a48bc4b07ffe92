"""Attention over the blocks of a layout."""

from shardlib.kernels.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]

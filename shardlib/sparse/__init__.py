"""Layouts of block-sparse attention."""

from shardlib.sparse.layout import Layout

__all__ = ["Layout"]

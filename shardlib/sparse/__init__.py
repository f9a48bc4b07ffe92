"""Layouts of block-sparse attention: the usual patterns, and any other."""

from shardlib.sparse.draw import draw, plot
from shardlib.sparse.flex import from_block_mask, to_block_mask
from shardlib.sparse.layout import Layout
from shardlib.sparse.patterns import bigbird, dense, fixed, longformer, sliding_window, variable

__all__ = [
    "bigbird",
    "dense",
    "draw",
    "fixed",
    "from_block_mask",
    "Layout",
    "longformer",
    "plot",
    "sliding_window",
    "to_block_mask",
    "variable",
]

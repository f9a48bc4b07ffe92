"""Styles, by which the slices of a layer work together: one file per style, and the base of new styles."""

from shardlib.collectives.styles.base import Compute, Losses, Style
from shardlib.collectives.styles.column import Column
from shardlib.collectives.styles.row import Row
from shardlib.collectives.styles.shared import Shared
from shardlib.collectives.styles.slices import Slice
from shardlib.collectives.styles.vocab import Vocab

__all__ = ["Column", "Compute", "Losses", "Row", "Shared", "Slice", "Style", "Vocab"]

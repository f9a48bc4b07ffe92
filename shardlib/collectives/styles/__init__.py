"""How sliced layers work together: one file per style, and what a style of one's own is."""

from shardlib.collectives.styles.base import Compute, Losses, Style
from shardlib.collectives.styles.column import Column
from shardlib.collectives.styles.row import Row
from shardlib.collectives.styles.shared import Shared
from shardlib.collectives.styles.slices import Slice
from shardlib.collectives.styles.vocab import Vocab

__all__ = ["Column", "Compute", "Losses", "Row", "Shared", "Slice", "Style", "Vocab"]

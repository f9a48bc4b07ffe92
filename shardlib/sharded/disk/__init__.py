"""Flat buffers of one rank in a few large files: read ahead, written behind, and kept step by step.

`store.Store` is what other rooms use, and `opening` opens those of all ranks. `layout` says where each buffer lies, `files`
opens, reserves and locks, `requests` reads and writes ranges, `record` says which step is whole, and `pool` lends the host
memory that all of it passes through.
"""

from shardlib.sharded.disk.layout import Flat
from shardlib.sharded.disk.opening import close_with, open_for_run, open_on_all_ranks
from shardlib.sharded.disk.store import PendingRead, Store

__all__ = ["Flat", "PendingRead", "Store", "close_with", "open_for_run", "open_on_all_ranks"]

"""Flat buffers of one rank in a few large files: read ahead, written behind, and kept step by step.

`Store` is what is read and written, and `TieredBuffers` what a run has there of its parameters, gradients or states. `files`
says where each buffer lies, opens, reserves and locks files, and has the record of the step that is whole; `pool` lends the
host memory that all of it passes through, and reads and writes ranges.
"""

from shardlib.sharded.disk.files import Flat
from shardlib.sharded.disk.pool import PendingRead
from shardlib.sharded.disk.store import Store
from shardlib.sharded.disk.tiered import TieredBuffers, open_on_all_ranks

__all__ = ["Flat", "PendingRead", "Store", "TieredBuffers", "open_on_all_ranks"]

"""Saving and restoring a train state, on the same mesh or another."""

from shardlib.checkpoint.commit import complete, remove, step_of
from shardlib.checkpoint.manager import Manager
from shardlib.checkpoint.restore import bytes_to_read, checkpoint_at, latest, read_notes, restore
from shardlib.checkpoint.save import save

__all__ = [
    "Manager",
    "bytes_to_read",
    "checkpoint_at",
    "complete",
    "latest",
    "read_notes",
    "remove",
    "restore",
    "save",
    "step_of",
]

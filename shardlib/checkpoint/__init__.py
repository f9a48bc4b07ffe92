"""Saving and restoring a train state, on the same mesh or another."""

from shardlib.checkpoint.restore import latest, read_notes, restore
from shardlib.checkpoint.save import save

__all__ = ["latest", "read_notes", "restore", "save"]

"""Saving and restoring a train state, on the same mesh or another."""

from shardlib.checkpoint.manager import Manager
from shardlib.checkpoint.restore import bytes_to_read, latest, read_notes, restore
from shardlib.checkpoint.save import save

__all__ = ["Manager", "bytes_to_read", "latest", "read_notes", "restore", "save"]

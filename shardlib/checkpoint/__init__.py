"""Saving and restoring a train state, on the same mesh or another."""

from shardlib.checkpoint.store import latest, restore, save

__all__ = ["latest", "restore", "save"]

"""Meshes of ranks, the specs of tensors on them, and the transports between ranks."""

from shardlib.mesh import transport

__all__ = ["transport"]

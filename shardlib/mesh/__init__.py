"""Meshes of ranks, the specs of tensors on them, and the transports between ranks."""

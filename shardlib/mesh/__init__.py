"""Meshes of ranks, what lies where on them, and the transports beneath."""

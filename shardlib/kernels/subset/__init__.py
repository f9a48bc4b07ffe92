"""Some of a sequence's tokens, and what became of them back in their places."""

from shardlib.kernels.subset.op import put, take

__all__ = ["put", "take"]

"""Rows of tokens by assignment, in any order, and their weighted sums back."""

from shardlib.kernels.permute.op import permute, unpermute

__all__ = ["permute", "unpermute"]

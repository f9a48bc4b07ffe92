"""Attention of one new token of each sequence to the keys of its own sequence, in a cache."""

from shardlib.kernels.cached_attention.op import cached_attention

__all__ = ["cached_attention"]

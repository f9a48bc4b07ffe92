"""Collectives by axis name: counted primitives beneath, dual pairs that autograd crosses above."""

from shardlib.collectives.pairs import all_gather, all_reduce, all_to_all, broadcast, permute, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter"]

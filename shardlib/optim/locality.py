"""`Locality`: what a gradient transformation reads beyond the element that it writes."""

from __future__ import annotations

import enum


class Locality(enum.Enum):
    """The elements that a transformation reads beyond the element that it writes. Each locality includes the ones above
    it."""

    ELEMENTWISE = "elementwise"  # nothing (Adam, SGD)
    GLOBAL = "global"  # sums over all elements, through ``shards.sum`` (the global norm)
    LEAF = "leaf"  # sums over the same parameter, through ``shards.leaf_sums`` or ``shards.total`` (LAMB, Adafactor)
    WHOLE = "whole"  # the whole parameter, gathered on one rank, through ``shards.whole`` (Muon)

    def includes(self, other: Locality) -> bool:
        kinds = list(Locality)
        return kinds.index(other) <= kinds.index(self)


def widest(*localities: Locality | None) -> Locality | None:
    """The locality of several transformations together; None if one of them declares none."""
    if None in localities:
        return None
    return next(kind for kind in reversed(Locality) if kind in localities)

"""Moves: which run of elements goes from which rank's memory to which, when the rows of a sharded tensor change places."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Place = tuple[int, ...]  # a rank's coordinates along all axes of the mesh


class Move(NamedTuple):
    """A run of elements that goes from one rank to another, or to another place on the same one.

    Attributes:
        source, target: the ranks.
        start: the index of the first element among those that ``source`` holds.
        into: its index among those that ``target`` holds.
        length: number of elements.
    """

    source: Place
    target: Place
    start: int
    into: int
    length: int


def moves(extents: Mapping[Place, range], row: int, came_from: Sequence[int]) -> Iterator[Move]:
    """The moves after which row r of a tensor holds what row ``came_from[r]`` held. What stays in its place is left out.

    Args:
        extents: the elements of the flattened tensor that each rank holds. Every element is held once.
        row: elements of a row.

    >>> from shardlib.checkpoint.relayout.moves import moves
    >>> [tuple(move) for move in moves({(0,): range(0, 4), (1,): range(4, 8)}, row=2, came_from=[2, 1, 0, 3])]
    [((1,), (0,), 0, 0, 2), ((0,), (1,), 0, 0, 2)]
    """
    holders = sorted((extent.start, place) for place, extent in extents.items() if extent)
    starts = [start for start, _ in holders]
    for target, extent in extents.items():
        at = extent.start
        while at < extent.stop:
            new, within = divmod(at, row)
            wanted = came_from[new] * row + within
            source = holders[bisect_right(starts, wanted) - 1][1]
            held = extents[source]
            length = min((new + 1) * row, extent.stop) - at
            length = min(length, held.stop - wanted)
            if wanted != at:
                yield Move(source, target, wanted - held.start, at - extent.start, length)
            at += length

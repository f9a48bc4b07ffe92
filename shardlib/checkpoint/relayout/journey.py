"""The exchange of moved elements between ranks: an all-to-all along each axis of the mesh on which elements move."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.collectives import primitives
from shardlib.common.tensors import raw_bytes
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Splits

# Moves: which run of elements goes from which rank's memory to which, when the rows of a sharded tensor change places.


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

    >>> from shardlib.checkpoint.relayout.journey import moves
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


class MovingRows(NamedTuple):
    """Elements of a tensor whose rows move.

    Attributes:
        data: those that this rank holds, in order: a view of the state.
        extents: the elements of the flattened tensor that this rank and those hold with which it exchanges rows.
        row: elements of a row.
    """

    data: torch.Tensor
    extents: Mapping[Place, range]
    row: int


class Parcel(NamedTuple):
    """A move of one of several tensors, and its size in bytes."""

    tensor: int
    move: Move
    size: int


def parcels(tensors: Sequence[MovingRows], came_from: Sequence[int]) -> list[Parcel]:
    """All parcels of the ranks that exchange rows of ``tensors``, in the same order on each of them."""
    return [
        Parcel(number, move, move.length * held.data.element_size())
        for number, held in enumerate(tensors)
        for move in moves(held.extents, held.row, came_from)
    ]


def sent_bytes(mesh: Mesh, parcels: Sequence[Parcel]) -> dict[str, int]:
    """Axis -> bytes that this rank sends when `move_rows` exchanges these parcels."""
    axes, here = list(mesh.shape), _place(mesh)
    hops = {axis: _Hop(parcels, here, k, mesh.shape[axis]) for k, axis in enumerate(axes)}
    return {axis: sum(hop.bytes(hop.leaving)) for axis, hop in hops.items()}


def move_rows(mesh: Mesh, tensors: Sequence[MovingRows], came_from: Sequence[int]) -> None:
    """Make row r of each tensor what its row ``came_from[r]`` was, in place. Collective.

    A parcel goes along one axis after the other, so it passes through ranks that it is not for; at most through one for each
    axis but the last. All tensors travel in one message to each rank of an axis.
    """
    here, under_way = _place(mesh), parcels(tensors, came_from)
    flat = [held.data.reshape(-1) for held in tensors]
    cargo = {
        number: raw_bytes(flat[tensor][move.start : move.start + move.length]).to(mesh.device, copy=True)
        for number, (tensor, move, _) in enumerate(under_way)
        if move.source == here
    }
    for k, (axis, size) in enumerate(mesh.shape.items()):
        hop = _Hop(under_way, here, k, size)
        if not hop.used:
            continue
        sent, received = hop.bytes(hop.leaving), hop.bytes(hop.arriving)
        leaving = [cargo.pop(number) for numbers in hop.leaving for number in numbers]
        out = torch.cat([torch.empty(0, dtype=torch.uint8, device=mesh.device), *leaving])
        inp = out.new_empty(sum(received))
        primitives.all_to_all(mesh, axis, inp, out, Splits(sent, received)).wait()
        arriving = [number for numbers in hop.arriving for number in numbers]
        cargo.update(zip(arriving, inp.split([under_way[number].size for number in arriving]), strict=True))
    for number, data in cargo.items():
        tensor, move, _ = under_way[number]
        raw_bytes(flat[tensor][move.into : move.into + move.length]).copy_(data)
    for held, changed in zip(tensors, flat, strict=True):
        if not held.data.is_contiguous():  # of which `changed` is a copy
            held.data.copy_(changed.view(held.data.shape))


class _Hop:
    """The parcels that go along axis k from and to this rank, by the other rank's coordinate on it.

    Attributes:
        leaving, arriving: their numbers.
        used: whether any parcel goes along the axis between the ranks of this rank's line.
    """

    def __init__(self, parcels: Sequence[Parcel], here: Place, k: int, size: int) -> None:
        self._parcels = parcels
        self.leaving: list[list[int]] = [[] for _ in range(size)]
        self.arriving: list[list[int]] = [[] for _ in range(size)]
        self.used = False
        for number, (_, move, _) in enumerate(parcels):
            start, stop = move.source[k], move.target[k]
            if start == stop:
                continue
            before = *move.target[:k], *move.source[k:]
            if before[:k] == here[:k] and before[k + 1 :] == here[k + 1 :]:
                self.used = True
                if start == here[k]:
                    self.leaving[stop].append(number)
                if stop == here[k]:
                    self.arriving[start].append(number)

    def bytes(self, numbers: Sequence[Sequence[int]]) -> list[int]:
        """Bytes to or from each rank of the axis."""
        return [sum(self._parcels[number].size for number in some) for some in numbers]


def _place(mesh: Mesh) -> Place:
    return tuple(mesh.coords[axis] for axis in mesh.shape)

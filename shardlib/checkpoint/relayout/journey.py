"""The exchange of moved elements between ranks: an all-to-all along each axis of the mesh on which elements move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.relayout.moves import Move, Place, moves
from shardlib.collectives import primitives
from shardlib.common.raw_bytes import raw_bytes
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Splits


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

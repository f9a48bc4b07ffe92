"""What compressed exchanges left out, saved and restored.

Where the same exchanges are made by as many ranks every rank gets its own errors back. Elsewhere what counts is the
*total*: the sum of all ranks' errors of an element is what the next gradient has still to be given (of a mean, the ranks'
mean). It is shared out evenly over the ranks' first errors, and the other errors start from zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.overlap import fill, missing
from shardlib.checkpoint.pieces import Piece, Window, windows
from shardlib.compression import Channel
from shardlib.mesh import Mesh
from shardlib.plan import Plan
from shardlib.train import TrainState

_log = logging.getLogger("shardlib.checkpoint")


class Part(NamedTuple):
    """One leaf's part of one error.

    Attributes:
        kind: "sum" or "mean", what the exchange gives.
        what: the axis, and which of the exchange's two errors.
        holder, ranks: which it is of how many different errors of the same elements.
        start: the first of the elements of the leaf (or slice) it holds, in order; ``data`` is a view of the error.
        first: whether it takes a share of a total.
    """

    kind: str
    what: str
    holder: int
    ranks: int
    path: str
    start: int
    data: torch.Tensor
    numel: int
    window: Window | None
    first: bool

    @property
    def name(self) -> str:
        return f"comm/{self.kind}/{self.what}/{self.holder} of {self.ranks}/{self.path}"

    def piece(self, data: torch.Tensor) -> Piece:
        """``data``, flat and in order, without the padding."""
        return Piece(self.name, self.start, data[: max(0, self.numel - self.start)], self.window)


class Name(NamedTuple):
    """What a part's name says of it."""

    kind: str
    what: str
    ranks: int
    path: str


def _read(name: str) -> Name:
    _, kind, what, holder, path = name.split("/", 4)
    return Name(kind, what, int(holder.rpartition(" of ")[2]), path)


def error_pieces(state: TrainState) -> Iterator[Piece]:
    """What this rank saves of its errors."""
    plan, mesh = state.params.plan, state.params.mesh
    for channel in plan.channels:
        speaks = not channel.mean or plan.counts(channel.bucket, mesh.coords)
        if speaks and not any(mesh.coords[axis] for axis in _same(plan, channel)):
            for part in _parts(plan, mesh, channel, state.comm):
                yield part.piece(part.data.reshape(-1))


def restore_errors(state: TrainState, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Fill the errors of ``state`` from a checkpoint's pieces."""
    plan, mesh = state.params.plan, state.params.mesh
    trained = {path for bucket in plan.trained for path in bucket.paths}
    names = [name for name in saved if name.startswith("comm/") and _read(name).path in trained]
    were, are = {_exchange(_read(name)) for name in names}, set(_exchanges(plan))
    if lost := {kind for kind, *_ in were} - {kind for kind, *_ in are}:
        told = " and ".join({"sum": "gradients", "mean": "the optimizer's means"}[kind] for kind in sorted(lost))
        _log.warning(
            "what compressed exchanges of %s left out is dropped: this plan has none with error feedback", told
        )
    parts = [part for channel in plan.channels for part in _parts(plan, mesh, channel, state.comm)]
    pieces = [part.piece(part.data.new_zeros(part.data.numel())) for part in parts]
    same = were <= are and all(not missing(piece, saved.get(piece.name, ())) for piece in pieces if piece.data.numel())
    for part, piece in zip(parts, pieces, strict=True):
        if same:
            fill(piece, saved.get(piece.name, ()))
        elif part.first:
            total = _total(part, {name: saved[name] for name in names})
            mine = total[part.window.places()] if part.window else total
            share = mine[piece.start : piece.start + piece.data.numel()]
            piece.data.copy_(share / (1 if part.kind == "mean" else part.ranks))
        flat = torch.zeros(part.data.numel(), dtype=part.data.dtype)
        flat[: piece.data.numel()] = piece.data
        part.data.copy_(flat.view(part.data.shape))


def _exchanges(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Kind, axis and error, and leaf, of all errors of a plan."""
    for channel in plan.channels:
        for number in range(len(channel.errors)):
            for path in channel.bucket.paths:
                yield _kind(channel), _what(channel, number), path


def _exchange(name: Name) -> tuple[str, str, str]:
    return name.kind, name.what, name.path


def _kind(channel: Channel) -> str:
    return "mean" if channel.mean else "sum"


def _what(channel: Channel, number: int) -> str:
    return f"{channel.axis} {'row' if number else 'sent'}"


def _total(part: Part, saved: Mapping[str, Sequence[Piece]]) -> torch.Tensor:
    """What all ranks' errors of a leaf come to."""
    shape = part.window.shape if part.window else (part.numel,)
    total = torch.zeros(math.prod(shape), dtype=torch.float64)
    for name, pieces in saved.items():
        about = _read(name)
        if (about.kind, about.path) != (part.kind, part.path):
            continue
        weight = 1 / about.ranks if about.kind == "mean" else 1.0
        for piece in pieces:
            stop = piece.start + piece.data.numel()
            places = piece.window.places()[piece.start : stop] if piece.window else slice(piece.start, stop)
            total[places] += piece.data * weight
    return total


def _parts(plan: Plan, mesh: Mesh, channel: Channel, comm: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Each leaf's part of a channel's errors on this rank."""
    bucket, kind, cuts = channel.bucket, _kind(channel), windows(plan, mesh, channel.bucket)
    alike = [other for other in plan.channels if other.bucket.name == bucket.name and other.mean == channel.mean]
    first = channel is next((other for other in alike if other.errors), None)
    for number, name in enumerate(channel.errors):
        holder, ranks = _holder(plan, mesh, channel, number)
        for path, numel, start, data in _views(channel, comm[name], number, mesh.coords):
            cut, takes = cuts.get(path), first and number == 0
            yield Part(kind, _what(channel, number), holder, ranks, path, start, data, numel, cut, takes)


def _holder(plan: Plan, mesh: Mesh, channel: Channel, number: int) -> tuple[int, int]:
    """Which this rank is, of how many whose errors of the same elements differ."""
    place, ranks, homes = 0, 1, channel.bucket.homes
    for axis in _differing(plan, channel, number):
        if plan.pipeline is not None and axis == plan.pipeline.axis:
            at, size = homes.index(mesh.coords[axis]), len(homes)
        else:
            at, size = mesh.coords[axis], mesh.shape[axis]
        place, ranks = place * size + at, ranks * size
    return place, ranks


def _views(
    channel: Channel, error: torch.Tensor, number: int, coords: Mapping[str, int]
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Path, elements, first element, and view, of the leaves that an error is of."""
    bucket, level = channel.bucket, channel.level
    leaves = list(zip(bucket.paths, bucket.numels, bucket.chunks, strict=True))
    if level is not None:
        owners = bucket.parts(level)
        rows = error.view(channel.ways, -1)[:, : channel.elements // channel.ways]
        table = rows.unflatten(1, (-1, bucket.owned))
        place = 0
        for path, numel, chunk in leaves:
            start = bucket.owner(coords, 0, level) * owners * chunk
            yield path, numel, start, table[..., place : place + chunk]
            place += chunk
        return
    index, width = bucket.owner(coords, 0, bucket.levels), len(error)
    begin = coords[channel.axis] * width if number else 0
    place = 0
    for path, numel, chunk in leaves:
        low, high = max(place, begin), min(place + chunk, begin + width)
        if low < high:
            yield path, numel, index * chunk + low - place, error[low - begin : high - begin]
        place += chunk


def _differing(plan: Plan, channel: Channel, number: int) -> tuple[str, ...]:
    """Axes whose ranks hold different errors of the same elements."""
    bucket, level = channel.bucket, channel.level
    # A tied leaf's homes sum their gradients before an optimizer sees them, and after they were reduced.
    homes = (plan.pipeline.axis,) if plan.pipeline is not None and len(bucket.homes) > 1 and not channel.mean else ()
    if level is not None:
        return (*homes, *bucket.axes[level:], *bucket.replicas)
    later = () if channel.mean else bucket.replicas[bucket.replicas.index(channel.axis) + 1 :]
    return (*homes, *((channel.axis,) if number == 0 else ()), *later)


def _same(plan: Plan, channel: Channel) -> list[str]:
    """Axes whose ranks hold the same errors."""
    bucket = channel.bucket
    own = {*_differing(plan, channel, 0), *bucket.axes, *bucket.slices}
    if plan.pipeline is not None:
        own.add(plan.pipeline.axis)
    return [axis for axis, size in plan.sizes.items() if size > 1 and axis not in own]

"""What compressed exchanges keep, saved and restored.

Where the same exchanges are made by as many ranks every rank gets its own errors back. Elsewhere what counts is the
*total*: the sum of all ranks' errors of an element is what the next gradient has still to be given (of a mean, the ranks'
mean). It is shared out evenly over the ranks' first errors, and the other errors start from zero. Factors are equal on all
ranks of their axis, and are taken over by any number of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.overlap import fill, missing
from shardlib.checkpoint.pieces import Piece, windows
from shardlib.collectives.codecs.base import Kept
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import TrainState
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel
from shardlib.plan.plan import Plan

_log = logging.getLogger("shardlib.checkpoint")

_ERRORS = ("sum", "mean")


class Part(NamedTuple):
    """One leaf's part of one kept tensor.

    Attributes:
        kind: of errors "sum" or "mean", what the exchange gives; of factors "factors" and their shape.
        what: the axis, and which of what is kept for its exchange.
        holder, ranks: which it is of how many different ones of the same elements.
        start: the first of the elements of the leaf (or slice, or factor) it holds, in order; ``data`` is a view of what
            is kept, ``numel`` the elements of them all.
        first: whether it takes a share of a total.
        speaks: whether it is this rank's to save.
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
    speaks: bool

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

    @property
    def exchange(self) -> tuple[str, str, str]:
        return self.kind, self.what, self.path


def _read(name: str) -> Name:
    _, kind, what, holder, path = name.split("/", 4)
    return Name(kind, what, int(holder.rpartition(" of ")[2]), path)


def error_pieces(state: TrainState) -> Iterator[Piece]:
    """What this rank saves of what its exchanges keep."""
    for channel in state.params.plan.channels:
        for part in _parts(state, channel):
            if part.speaks:
                yield part.piece(part.data.reshape(-1))


def restore_errors(state: TrainState, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Fill what the exchanges of ``state`` keep from a checkpoint's pieces."""
    plan = state.params.plan
    trained = {path for bucket in plan.trained for path in bucket.paths}
    kept = {name: pieces for name, pieces in saved.items() if name.startswith("comm/") and _read(name).path in trained}
    found = [part for channel in plan.channels for part in _parts(state, channel)]
    for part in found:
        if part.kind not in _ERRORS:
            _take_over(part, kept)
    were, are = {_read(name).exchange for name in kept if _read(name).kind in _ERRORS}, set(_exchanges(plan))
    lost = {kind for kind, *_ in were} - {kind for kind, *_ in are}
    if lost and state.params.mesh.rank == 0:
        told = " and ".join({"sum": "gradients", "mean": "the optimizer's means"}[kind] for kind in sorted(lost))
        _log.warning(
            "what compressed exchanges of %s left out is dropped: this plan has none with error feedback", told
        )
    parts = [part for part in found if part.kind in _ERRORS]
    pieces = [part.piece(part.data.new_zeros(part.data.numel())) for part in parts]
    same = were <= are and all(not missing(piece, kept.get(piece.name, ())) for piece in pieces if piece.data.numel())
    for part, piece in zip(parts, pieces, strict=True):
        if same:
            fill(piece, kept.get(piece.name, ()))
        elif part.first:
            total = _total(part, kept)
            mine = total[part.window.places()] if part.window else total
            share = mine[piece.start : piece.start + piece.data.numel()]
            piece.data.copy_(share / (1 if part.kind == "mean" else part.ranks))
        flat = torch.zeros(part.data.numel(), dtype=part.data.dtype)
        flat[: piece.data.numel()] = piece.data
        part.data.copy_(flat.view(part.data.shape))


def _exchanges(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Kind, what is kept of it, and leaf, of all errors of a plan."""
    for channel in plan.channels:
        for kept in channel.keeps.values():
            if kept.residual:
                for path in channel.bucket.paths:
                    yield _kind(channel), _what(channel, kept), path


def _kind(channel: Channel) -> str:
    return "mean" if channel.mean else "sum"


def _what(channel: Channel, kept: Kept) -> str:
    return f"{channel.axis} {kept.name}"


def _take_over(part: Part, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Factors as this rank's were saved, or else as any rank's were; they stay a first guess where none of the shape were."""
    alike = [pieces for name, pieces in saved.items() if (_read(name).kind, _read(name).path) == (part.kind, part.path)]
    for pieces in (saved[part.name],) if part.name in saved else alike[:1]:
        fill(part.piece(part.data), pieces)


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


def _parts(state: TrainState, channel: Channel) -> Iterator[Part]:
    """Each leaf's part of what a channel keeps on this rank."""
    plan, mesh, bucket = state.params.plan, state.params.mesh, channel.bucket
    cuts, coords = windows(plan, mesh, bucket), mesh.coords
    alike = [other for other in plan.channels if other.bucket.name == bucket.name and other.mean == channel.mean]
    first = channel is next((other for other in alike if _has_errors(other)), None)
    counts = not channel.mean or plan.counts(bucket, coords)
    for name, kept in channel.keeps.items():
        what, (holder, ranks) = _what(channel, kept), _holder(plan, mesh, channel, kept)
        speaks = counts and not any(coords[axis] for axis in _same(plan, channel, kept))
        if not kept.residual:
            for path, shape, data in _factors(bucket, kept, state.comm[name]):
                yield Part(f"factors {shape}", what, holder, ranks, path, 0, data, data.numel(), None, False, speaks)
            continue
        kind, share = _kind(channel), first and not kept.by_row
        for path, numel, start, data in _views(channel, state.comm[name], kept, coords):
            yield Part(kind, what, holder, ranks, path, start, data, numel, cuts.get(path), share, speaks)


def _holder(plan: Plan, mesh: Mesh, channel: Channel, kept: Kept) -> tuple[int, int]:
    """Which this rank is, of how many that hold different ones of the same elements."""
    place, ranks, homes = 0, 1, channel.bucket.homes
    for axis in _differing(plan, channel, kept):
        if axis in plan.stages.axes:
            at, size = homes.index(mesh.coords[axis]), len(homes)
        else:
            at, size = mesh.coords[axis], mesh.shape[axis]
        place, ranks = place * size + at, ranks * size
    return place, ranks


def _has_errors(channel: Channel) -> bool:
    return any(kept.residual for kept in channel.keeps.values())


def _factors(bucket: Bucket, kept: Kept, data: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Path, shape and view of each leaf's."""
    parts = data.split([math.prod(shape) for _, shape in kept.shapes])
    for (leaf, shape), part in zip(kept.shapes, parts, strict=True):
        yield bucket.paths[leaf], "×".join(map(str, shape)), part


def _views(
    channel: Channel, error: torch.Tensor, kept: Kept, coords: Mapping[str, int]
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Path, elements, first element, and view, of the leaves that an error is of."""
    bucket, level = channel.bucket, channel.level
    leaves = list(zip(bucket.paths, bucket.held(coords), bucket.chunks, strict=True))
    if level is not None:
        owners = bucket.owners(level)
        rows = error.view(channel.ways, -1)[:, : channel.elements // channel.ways]
        table = rows.unflatten(1, (-1, bucket.owned))
        place = 0
        for path, numel, chunk in leaves:
            start = bucket.owner(coords, 0, level) * owners * chunk
            yield path, numel, start, table[..., place : place + chunk]
            place += chunk
        return
    index, width = bucket.owner(coords, 0, bucket.levels), len(error)
    begin = coords[channel.axis] * width if kept.by_row else 0
    place = 0
    for path, numel, chunk in leaves:
        low, high = max(place, begin), min(place + chunk, begin + width)
        if low < high:
            yield path, numel, index * chunk + low - place, error[low - begin : high - begin]
        place += chunk


def _differing(plan: Plan, channel: Channel, kept: Kept) -> tuple[str, ...]:
    """Axes whose ranks hold different ones of the same elements."""
    bucket, level = channel.bucket, channel.level
    # A tied leaf's homes sum their gradients before an optimizer sees them, and after they were reduced.
    homes = plan.stages.axes if len(bucket.homes) > 1 and not channel.mean else ()
    if level is not None:
        return (*homes, *bucket.axes[level:], *bucket.replicas)
    if not kept.residual:
        own = bucket.slices
    else:
        own = () if kept.by_row else (channel.axis,)
    later = () if channel.mean else bucket.replicas[bucket.replicas.index(channel.axis) + 1 :]
    return (*homes, *own, *later)


def _same(plan: Plan, channel: Channel, kept: Kept) -> list[str]:
    """Axes whose ranks hold the same."""
    bucket = channel.bucket
    own = {*_differing(plan, channel, kept), *bucket.axes, *bucket.slices, *plan.stages.axes}
    if kept.by_row:
        own.add(channel.axis)
    return [axis for axis, size in plan.sizes.items() if size > 1 and axis not in own]

"""What compressed exchanges keep, saved and restored.

On the same mesh every rank gets its own errors back. On another one what counts is the *total*: the sum of all ranks'
errors of an element is what the next gradient has still to be given (of a mean, the ranks' mean). It is shared out evenly
over the ranks' first errors, and the other errors start from zero. Factors are equal on all ranks of their axis, and are
taken over by any number of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.overlap import fill, missing
from shardlib.checkpoint.pieces import Piece, Window, windows
from shardlib.collectives.sums import Kept
from shardlib.compression import Channel
from shardlib.layout import Bucket
from shardlib.plan import Plan
from shardlib.train import TrainState

_log = logging.getLogger("shardlib.checkpoint")

_ERRORS = ("sum", "mean")


class Part(NamedTuple):
    """One leaf's part of one kept tensor.

    Attributes:
        kind: of errors "sum" or "mean", what the exchange gives; of factors "factors" and their shape.
        holder: which one it is, and which of the ranks' that differ.
        start: the first of the elements of the leaf (or slice, or factor) it holds, in order; ``data`` is a view of what
            is kept, ``numel`` the elements of them all.
        ranks: how many hold different ones of the same elements.
        first: whether the ranks' share in what other ranks left out.
        speaks: whether it is this rank's to save.
    """

    kind: str
    holder: str
    path: str
    start: int
    data: torch.Tensor
    numel: int
    window: Window | None
    ranks: int
    first: bool
    speaks: bool

    @property
    def name(self) -> str:
        return f"comm/{self.kind}/{self.holder}/{self.path}"

    def piece(self, data: torch.Tensor) -> Piece:
        """``data``, flat and in order, without the padding."""
        return Piece(self.name, self.start, data[: max(0, self.numel - self.start)], self.window)


def error_pieces(state: TrainState) -> Iterator[Piece]:
    """What this rank saves of what its exchanges keep."""
    for channel in state.params.plan.channels:
        for part in _parts(state, channel):
            if part.speaks:
                yield part.piece(part.data.reshape(-1))


def restore_errors(state: TrainState, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Fill what the exchanges of ``state`` keep from a checkpoint's pieces."""
    plan = state.params.plan
    kept = {name: pieces for name, pieces in saved.items() if name.startswith("comm/")}
    if kept and not plan.channels:
        _log.warning("the checkpoint's errors of compressed exchanges are dropped: this plan compresses none")
    found = [part for channel in plan.channels for part in _parts(state, channel)]
    for part in found:
        if part.kind not in _ERRORS:
            _take_over(part, kept)
    parts = [part for part in found if part.kind in _ERRORS]
    pieces = [part.piece(part.data.new_zeros(part.data.numel())) for part in parts]
    same = all(not missing(piece, kept.get(piece.name, ())) for piece in pieces if piece.data.numel())
    totals: dict[tuple[str, str], torch.Tensor] = {}
    for part, piece in zip(parts, pieces, strict=True):
        if same:
            fill(piece, kept.get(piece.name, ()))
        elif part.first:
            if (part.kind, part.path) not in totals:
                totals[part.kind, part.path] = _total(part, kept)
            total = totals[part.kind, part.path]
            mine = total[part.window.places()] if part.window else total
            share = mine[piece.start : piece.start + piece.data.numel()]
            piece.data.copy_(share / (1 if part.kind == "mean" else part.ranks))
        flat = torch.zeros(part.data.numel(), dtype=part.data.dtype)
        flat[: piece.data.numel()] = piece.data
        part.data.copy_(flat.view(part.data.shape))


def _take_over(part: Part, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Factors as this rank's were saved, or else as any rank's were; they stay a first guess where none of the shape were."""
    alike = [pieces for name, pieces in saved.items() if name.split("/", 3)[1::2] == [part.kind, part.path]]
    for pieces in (saved[part.name],) if part.name in saved else alike[:1]:
        fill(part.piece(part.data), pieces)


def _total(part: Part, saved: Mapping[str, Sequence[Piece]]) -> torch.Tensor:
    """What all ranks' errors of a leaf come to."""
    shape = part.window.shape if part.window else (part.numel,)
    total = torch.zeros(math.prod(shape), dtype=torch.float64)
    for name, pieces in saved.items():
        _, kind, holder, path = name.split("/", 3)
        if (kind, path) != (part.kind, part.path):
            continue
        weight = 1 / int(holder.rpartition(" of ")[2]) if kind == "mean" and " of " in holder else 1.0
        for piece in pieces:
            stop = piece.start + piece.data.numel()
            places = piece.window.places()[piece.start : stop] if piece.window else slice(piece.start, stop)
            total[places] += piece.data * weight
    return total


def _parts(state: TrainState, channel: Channel) -> Iterator[Part]:
    """Each leaf's part of what a channel keeps on this rank."""
    plan, mesh, bucket = state.params.plan, state.params.mesh, channel.bucket
    cuts, coords = windows(plan, mesh, bucket), mesh.coords
    first = channel is next(other for other in plan.channels if other.bucket.name == bucket.name)
    counts = not channel.mean or plan.counts(bucket, coords)
    for name, kept in channel.keeps.items():
        differing = _differing(plan, channel, kept)
        ranks = math.prod(mesh.shape[axis] for axis in differing)
        at = 0
        for axis in differing:
            at = at * mesh.shape[axis] + coords[axis]
        holder = f"{channel.axis} {kept.kind}" + (f" {at} of {ranks}" if differing else "")
        speaks = counts and not any(coords[axis] for axis in _same(plan, channel, kept))
        if kept.shapes:
            for path, shape, data in _factors(bucket, kept, state.comm[name]):
                yield Part(f"factors {shape}", holder, path, 0, data, data.numel(), None, ranks, False, speaks)
            continue
        kind, share = "mean" if channel.mean else "sum", first and kept.kind == "sent"
        for path, numel, start, data in _views(channel, state.comm[name], kept, coords):
            yield Part(kind, holder, path, start, data, numel, cuts.get(path), ranks, share, speaks)


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
    begin = coords[channel.axis] * width if kept.kind == "row" else 0
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
    homes = (plan.pipeline.axis,) if plan.pipeline is not None and len(bucket.homes) > 1 and not channel.mean else ()
    if level is not None:
        return (*homes, *bucket.axes[level:], *bucket.replicas)
    own = {"sent": (channel.axis,), "row": (), "factors": bucket.slices}[kept.kind]
    later = () if channel.mean else bucket.replicas[bucket.replicas.index(channel.axis) + 1 :]
    return (*homes, *own, *later)


def _same(plan: Plan, channel: Channel, kept: Kept) -> list[str]:
    """Axes whose ranks hold the same."""
    bucket = channel.bucket
    own = {*_differing(plan, channel, kept), *bucket.axes, *bucket.slices}
    if kept.kind == "row":
        own.add(channel.axis)
    if plan.pipeline is not None:
        own.add(plan.pipeline.axis)
    return [axis for axis, size in plan.sizes.items() if size > 1 and axis not in own]

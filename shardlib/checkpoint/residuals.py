"""Residuals and factors of compressed exchanges, saved and restored.

When the restored plan makes the same exchanges between as many ranks, every rank gets its own residuals back. Otherwise only
their *total* is restored: the sum over the ranks of an element's residuals, which the next gradients have still to be given
(for an exchange that takes a mean, the mean over the ranks). The total is divided evenly between the ranks' residuals of the
first exchange, and all other residuals start from zero. Factors are equal on all ranks of their axis, so any number of ranks
can take them over.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from shardlib.checkpoint.fragments import Fragment, windows
from shardlib.checkpoint.reading import Fill, TensorsOnDisk
from shardlib.checkpoint.trees import CheckpointTrees
from shardlib.collectives.codecs.base import Kept
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel
from shardlib.plan.plan import Plan

_log = logging.getLogger("shardlib.checkpoint")

RESIDUALS = "comm/"
_RESIDUALS = ("sum", "mean")


class KeptLeaf(NamedTuple):
    """One leaf's elements in a tensor that an exchange keeps: residuals, or a factor.

    Attributes:
        kind: for residuals "sum" or "mean", the result of the exchange; for factors "factors" and their shape.
        exchange: the axis, and the `Kept.name` of the tensor.
        holder, holders: the tensor's number among the different tensors that ranks keep for the same elements, and how many.
        path: the leaf's.
        start: the index of the first element in the flattened leaf (or slice, or factor).
        data: the elements, in order: a view of the kept tensor.
        numel: elements of the whole leaf (or slice, or factor).
        window: the slice of the leaf (or the whole factor).
        takes_total: whether a share of a restored total goes here.
        saves: whether this rank saves it.
    """

    kind: str
    exchange: str
    holder: int
    holders: int
    path: str
    start: int
    data: torch.Tensor
    numel: int
    window: Window
    takes_total: bool
    saves: bool

    @property
    def name(self) -> str:
        return f"{RESIDUALS}{self.kind}/{self.exchange}/{self.holder} of {self.holders}/{self.path}"

    def fragment(self, data: torch.Tensor) -> Fragment:
        """The fragment of this name with the elements of ``data``, which is flat and in order, without the padding."""
        return Fragment(self.name, self.start, data[: max(0, self.numel - self.start)], self.window)


class ResidualName(NamedTuple):
    """A `KeptLeaf.name`, split into its fields."""

    kind: str
    exchange: str
    holders: int
    path: str


def _parsed(saved: TensorsOnDisk) -> Iterator[tuple[str, ResidualName]]:
    for name in saved.tensors:
        if name.startswith(RESIDUALS):
            _, kind, exchange, holder, path = name.split("/", 4)
            yield name, ResidualName(kind, exchange, int(holder.rpartition(" of ")[2]), path)


def residual_fragments(trees: CheckpointTrees) -> Iterator[Fragment]:
    """This rank's fragments of the tensors that exchanges keep."""
    for channel in trees.params.plan.channels:
        for leaf in _kept_leaves(trees, channel):
            if leaf.saves:
                yield leaf.fragment(leaf.data.reshape(-1))


def kept_fragments(trees: CheckpointTrees) -> Iterator[Fragment]:
    """The fragments of all tensors that exchanges keep on this rank: views, one for each row where rows are scattered."""
    for channel in trees.params.plan.channels:
        for leaf in _kept_leaves(trees, channel):
            *rows, width = leaf.data.shape
            for number, index in enumerate(itertools.product(*map(range, rows))):
                yield leaf._replace(start=leaf.start + number * width).fragment(leaf.data[index])


def residual_fills(trees: CheckpointTrees, saved: TensorsOnDisk) -> Iterator[Fill]:
    """What fills the tensors that the exchanges of ``trees`` keep from a checkpoint."""
    plan = trees.params.plan
    trained = {path for bucket in plan.trained for path in bucket.paths}
    usable = {name: parsed for name, parsed in _parsed(saved) if parsed.path in trained}
    leaves = [leaf for channel in plan.channels for leaf in _kept_leaves(trees, channel)]
    residuals = [leaf for leaf in leaves if leaf.kind in _RESIDUALS]
    for leaf in leaves:
        if leaf.kind not in _RESIDUALS:
            yield from _factor_fill(leaf, usable)
    before = {(name.kind, name.exchange, name.path) for name in usable.values() if name.kind in _RESIDUALS}
    now = set(_exchanges(plan))
    same = before <= now and not any(
        saved.missing(fragment, fragment.name) for fragment in map(_planned, residuals) if fragment.data.numel()
    )
    for leaf in residuals:
        sources: tuple[tuple[str, float], ...] = ()
        if same:
            sources = ((leaf.name, 1.0),) if leaf.name in usable else ()
        elif leaf.takes_total:
            sources = tuple(_total(leaf, usable))
        yield Fill(_planned(leaf), sources, leaf.data)


def log_dropped(trees: CheckpointTrees, saved: TensorsOnDisk) -> None:
    """Warn of residuals in a checkpoint that no exchange of ``trees`` can take."""
    kinds = {name.kind for _, name in _parsed(saved) if name.kind in _RESIDUALS}
    kinds -= {kind for kind, *_ in _exchanges(trees.params.plan)}
    if kinds and trees.params.mesh.rank == 0:
        summed = " and ".join({"sum": "gradients", "mean": "the optimizer's means"}[kind] for kind in sorted(kinds))
        _log.warning(
            "the residuals of compressed exchanges of %s are dropped: this plan has no such exchange with error feedback",
            summed,
        )


def _planned(leaf: KeptLeaf) -> Fragment:
    """The fragment of a leaf's residuals, without memory."""
    return leaf.fragment(torch.empty(leaf.data.numel(), dtype=leaf.data.dtype, device="meta"))


def _factor_fill(leaf: KeptLeaf, usable: Mapping[str, ResidualName]) -> Iterator[Fill]:
    """What fills a factor: this rank's saved one, or else any rank's; none keeps the drawn factor if none of the shape was
    saved."""
    names = [name for name, parsed in usable.items() if (parsed.kind, parsed.path) == (leaf.kind, leaf.path)]
    for name in (leaf.name,) if leaf.name in names else names[:1]:
        yield Fill(leaf.fragment(leaf.data), ((name, 1.0),))


def _total(leaf: KeptLeaf, usable: Mapping[str, ResidualName]) -> Iterator[tuple[str, float]]:
    """The saved tensors, with weights, whose sum is a leaf's share of all ranks' residuals (for a mean, their mean)."""
    for name, parsed in usable.items():
        if (parsed.kind, parsed.path) == (leaf.kind, leaf.path):
            yield name, 1 / (parsed.holders if leaf.kind == "mean" else leaf.holders)


def _exchanges(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Kind, exchange and path (see `KeptLeaf`) of all residuals of a plan."""
    for channel in plan.channels:
        for kept in channel.keeps.values():
            if kept.residual:
                for path in channel.bucket.paths:
                    yield *_named(channel, kept), path


def _named(channel: Channel, kept: Kept) -> tuple[str, str]:
    """`KeptLeaf.kind` of residuals, and `KeptLeaf.exchange`."""
    return "mean" if channel.mean else "sum", f"{channel.axis} {kept.name}"


def _kept_leaves(trees: CheckpointTrees, channel: Channel) -> Iterator[KeptLeaf]:
    """Each leaf's elements in the tensors that a channel keeps on this rank."""
    plan, mesh, bucket = trees.params.plan, trees.params.mesh, channel.bucket
    slices, coords = windows(plan, mesh, bucket), mesh.coords
    same_result = [other for other in plan.channels if other.bucket.name == bucket.name and other.mean == channel.mean]
    first = channel is next(
        (other for other in same_result if any(kept.residual for kept in other.keeps.values())), None
    )
    counts = not channel.mean or plan.counts(bucket, coords)
    for name, kept in channel.keeps.items():
        (kind, exchange), (holder, holders) = _named(channel, kept), _holder(plan, mesh, channel, kept)
        saves = counts and not any(coords[axis] for axis in _equal_over(plan, channel, kept))
        if not kept.residual:
            for path, shape, data in _factors(bucket, kept, trees.comm[name]):
                kind, window = f"factors {shape}", Window.whole((data.numel(),))
                yield KeptLeaf(kind, exchange, holder, holders, path, 0, data, data.numel(), window, False, saves)
            continue
        takes = first and not kept.by_row
        for path, numel, start, data in residual_views(channel, trees.comm[name], kept, coords):
            yield KeptLeaf(kind, exchange, holder, holders, path, start, data, numel, slices[path], takes, saves)


def _holder(plan: Plan, mesh: Mesh, channel: Channel, kept: Kept) -> tuple[int, int]:
    """`KeptLeaf.holder` and `KeptLeaf.holders` of this rank."""
    holder, holders, homes = 0, 1, channel.bucket.homes
    for axis in _differing(plan, channel, kept):
        if axis in plan.stages.axes:
            index, size = homes.index(mesh.coords[axis]), len(homes)
        else:
            index, size = mesh.coords[axis], mesh.shape[axis]
        holder, holders = holder * size + index, holders * size
    return holder, holders


def _factors(bucket: Bucket, kept: Kept, data: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Path, shape and flat view of each leaf's factor."""
    factors = data.split([math.prod(shape) for _, shape in kept.shapes])
    for (leaf, shape), factor in zip(kept.shapes, factors, strict=True):
        yield bucket.paths[leaf], "×".join(map(str, shape)), factor


def residual_views(
    channel: Channel, residual: torch.Tensor, kept: Kept, coords: Mapping[str, int]
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Path, number of elements, index of the first held element, and view, of each leaf in a channel's residual."""
    bucket, level = channel.bucket, channel.level
    leaves = list(zip(bucket.paths, bucket.held(coords), bucket.chunks, strict=True))
    first = 0  # element of the leaf's chunk in an owner's row
    if level is not None:
        owners = bucket.owners(level)
        rows = residual.view(channel.ways, -1)[:, : channel.elements // channel.ways]
        table = rows.unflatten(1, (-1, bucket.owned))
        for path, numel, chunk in leaves:
            start = bucket.owner(coords, 0, level) * owners * chunk
            yield path, numel, start, table[..., first : first + chunk]
            first += chunk
        return
    index, width = bucket.owner(coords, 0, bucket.levels), len(residual)
    begin = coords[channel.axis] * width if kept.by_row else 0
    for path, numel, chunk in leaves:
        low, high = max(first, begin), min(first + chunk, begin + width)
        if low < high:
            yield path, numel, index * chunk + low - first, residual[low - begin : high - begin]
        first += chunk


def _differing(plan: Plan, channel: Channel, kept: Kept) -> tuple[str, ...]:
    """Axes whose ranks keep different tensors for the same elements."""
    bucket, level = channel.bucket, channel.level
    # The homes of a tied leaf sum their gradients after the reduction, so before the optimizer takes its means.
    homes = plan.stages.axes if len(bucket.homes) > 1 and not channel.mean else ()
    if level is not None:
        return (*homes, *bucket.axes[level:], *bucket.replicas)
    if not kept.residual:
        axes = bucket.slices
    else:
        axes = () if kept.by_row else (channel.axis,)
    later = () if channel.mean else bucket.replicas[bucket.replicas.index(channel.axis) + 1 :]
    return (*homes, *axes, *later)


def _equal_over(plan: Plan, channel: Channel, kept: Kept) -> list[str]:
    """Axes whose ranks keep equal tensors."""
    bucket = channel.bucket
    different = {*_differing(plan, channel, kept), *bucket.axes, *bucket.slices, *plan.stages.axes}
    if kept.by_row:
        different.add(channel.axis)
    return [axis for axis, size in plan.sizes.items() if size > 1 and axis not in different]

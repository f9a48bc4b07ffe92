"""The exchanges of a bucket in a step, as data. Executor, payload, prediction, print-out and checkpoints all read it.

A bucket at level k is split over its first k axes (see `shardlib.plan.buckets`). A gather takes a buffer from level k + 1 to
level k, a scatter from k to k + 1, and a sum leaves the level unchanged. Each is an `Exchange` over one axis, compressed or
not; `Routes` holds the exchanges of one bucket in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch

from shardlib.collectives.codecs.base import BoundCodec, Codec, Kept, Packing, Rows
from shardlib.collectives.summation import IN_FLOAT64, Summation
from shardlib.common.tensors import dtype_name
from shardlib.mesh.mesh import rank_of
from shardlib.mesh.specs import Leaf, P
from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import AxisOwner

# Compressed exchanges of gradients: one `Channel` for each bucket and axis, with the residuals that it keeps.


@dataclass(frozen=True)
class Channel:
    """The compressed exchange of one bucket over one axis.

    Attributes:
        ways: size of the axis.
        level: the level from which the exchange scatters the bucket over the axis; None where it is an all-reduce, over
            one of the bucket's replicas.
        mean: whether the result is the mean over the axis, for an optimizer that owns the axis; else the sum.
        later: the axes over which the result is summed afterwards, in this order, with their sizes.
    """

    bucket: Bucket
    axis: str
    ways: int
    codec: Codec
    level: int | None
    mean: bool = False
    later: Mapping[str, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Elements of the buffer that is exchanged."""
        return self.bucket.size(self.bucket.levels if self.level is None else self.level)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the buffer that is exchanged and of the residuals: fp32, or float64 for gradients in float64."""
        return torch.float64 if self.bucket.reduce_dtype == torch.float64 else torch.float32

    @cached_property
    def keeps(self) -> dict[str, Kept]:
        """Name in ``TrainState.comm`` -> tensor that stays from one exchange to the next."""
        return {f"{self.bucket.name}@{self.axis}/{kept.name}": kept for kept in self._of_some_rank.keeps}

    @property
    def bytes(self) -> int:
        """Bytes that one rank keeps from one exchange to the next."""
        return self.dtype.itemsize * sum(kept.elements for kept in self.keeps.values())

    @property
    def payload(self) -> int:
        """Bytes one rank sends."""
        return self._of_some_rank.payload

    def start(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The kept tensors before the first exchange, by name."""
        return dict(zip(self.keeps, self._of_some_rank.start(device), strict=True))

    def bind(self, coords: Mapping[str, int]) -> BoundCodec:
        """The codec bound to the buffer of the rank at these coordinates."""
        bucket, level = self.bucket, self.bucket.levels if self.level is None else self.level
        groups = dict(reversed(tuple(self.later.items())))  # what is summed last is major in the batch
        return self.codec.bind(
            Rows(
                ways=self.ways,
                index=coords[self.axis],
                elements=self.elements,
                filled=bucket.filled(coords, level),
                scattered=self.level is not None,
                mean=self.mean,
                dtype=self.dtype,
                shapes=() if bucket.levels else bucket.shapes,
                groups=math.prod(groups.values()),
                group=rank_of(groups, coords),
            )
        )

    @cached_property
    def _of_some_rank(self) -> BoundCodec:
        """The codec bound to the buffer of the first rank: sizes are the same on all ranks."""
        return self.bind(dict.fromkeys((*self.bucket.slices, *self.bucket.axes, self.axis, *self.later), 0))

    def leaves(self, sizes: Mapping[str, int]) -> list[Leaf]:
        """The kept tensors of all ranks, as leaves of the state: one row for each rank whose values differ."""
        leaves = []
        for name, kept in self.keeps.items():
            differing = {*self.bucket.slices, *self.bucket.axes, *self._differing(kept)}
            axes = tuple(axis for axis in sizes if axis in differing)
            rows = math.prod(sizes[axis] for axis in axes)
            leaves.append(Leaf(name, (rows, kept.elements), self.dtype, P(axes)))
        return leaves

    def _differing(self, kept: Kept) -> tuple[str, ...]:
        """Axes that no leaf is split over, and along which ranks keep different values."""
        if self.mean:  # the buffers were summed over all other axes before
            return (self.axis,) if kept.residual else ()
        if self.level is not None:
            return self.bucket.replicas
        # The buffers were summed over the replicas before this axis.
        return self.bucket.replicas[self.bucket.replicas.index(self.axis) + (not kept.residual) :]


@dataclass(frozen=True)
class Reductions:
    """What decides the exchanges of a step, besides the buckets.

    Attributes:
        codecs: axis -> codec of gradients, for axes that have one.
        packings: axis -> codec of gathered parameters, for axes on which they are compressed.
        second_level: the level of the second shard of the parameters, kept from forward to backward; None without one.
        owner: the optimizer that sums over an axis itself, or None.
        summation: how losses, weights and norms are summed.
    """

    codecs: Mapping[str, Codec] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    second_level: int | None = None
    owner: AxisOwner | None = field(default=None, compare=False)  # of the optimizer, not of the layout
    summation: Summation = IN_FLOAT64


class Collective(Enum):
    """The collective of an exchange."""

    GATHER = "gather"
    SCATTER = "reduce-scatter"
    SUM = "all-reduce"


@dataclass(frozen=True)
class Exchange:
    """One collective of one bucket over one axis.

    Attributes:
        ways: size of the axis.
        source: level of the bucket's buffer before the exchange.
        target: level of the bucket's buffer after the exchange.
        packing: compresses gathered parameters; None if they are sent uncompressed.
        channel: compresses gradients; None if they are sent uncompressed.
    """

    bucket: Bucket
    axis: str
    ways: int
    op: Collective
    source: int
    target: int
    packing: Packing | None = None
    channel: Channel | None = None

    @cached_property
    def payload(self) -> int:
        """Bytes one rank sends in a bandwidth-optimal algorithm: (n−1)/n of the buffer, twice for an all-reduce."""
        bucket, ways = self.bucket, self.ways
        if self.channel is not None:
            return self.channel.payload
        if self.packing is not None:
            return (ways - 1) * self.packing.size(bucket.size(self.source))
        if self.op is Collective.GATHER:
            return share(bucket.size(self.target) * bucket.dtype.itemsize, ways)
        times = 2 if self.op is Collective.SUM else 1
        return share(times * bucket.size(self.source) * bucket.reduce_dtype.itemsize, ways)

    @property
    def form(self) -> str:
        """The dtype or the codec in which values are sent, as printed."""
        if self.channel is not None:
            return str(self.channel.codec)
        dtype = self.bucket.dtype if self.op is Collective.GATHER else self.bucket.reduce_dtype
        return str(self.packing) if self.packing is not None else dtype_name(dtype)


@dataclass(frozen=True)
class Routes:
    """The exchanges of one bucket in a step, in order.

    Attributes:
        gather: before the first use of the parameters in a micro-batch.
        again: before later uses; shorter than ``gather`` where a second shard is kept from the first use on.
        each: after each micro-batch, from the whole gradient to the level at which gradients are accumulated.
        last: after the last micro-batch, from that level to the optimizer's layout.
        mean: the compressed mean over the axis that the optimizer owns, instead of the sum in ``last``; None without one.
        restore: after the update, from the optimizer's layout to the stored parameters.
    """

    gather: tuple[Exchange, ...]
    again: tuple[Exchange, ...]
    each: tuple[Exchange, ...]
    last: tuple[Exchange, ...]
    mean: Exchange | None
    restore: tuple[Exchange, ...]

    @property
    def reductions(self) -> tuple[Exchange, ...]:
        """All exchanges from a whole, partial gradient to the optimizer's layout."""
        return (*self.each, *self.last)


def routes_of(bucket: Bucket, reductions: Reductions, sizes: Mapping[str, int]) -> Routes:
    """The exchanges of a bucket on a mesh with axes of these sizes."""
    second = reductions.second_level
    stop = bucket.param_level if second is None else min(second, bucket.param_level)
    reduced = tuple(_reduced(bucket, reductions, sizes)) if bucket.trainable else ()
    return Routes(
        gather=gathers(bucket, 0, bucket.param_level, reductions.packings),
        again=gathers(bucket, 0, stop, reductions.packings),
        each=reduced[: bucket.grad_level],
        last=reduced[bucket.grad_level :],
        mean=_mean(bucket, reductions, sizes),
        restore=gathers(bucket, bucket.param_level, bucket.levels, {}) if bucket.trainable else (),
    )


def gathers(bucket: Bucket, start: int, stop: int, packings: Mapping[str, Packing]) -> tuple[Exchange, ...]:
    """The gathers of a bucket from level ``stop`` to level ``start``."""
    return tuple(
        Exchange(bucket, axis, ways, Collective.GATHER, level + 1, level, packing)
        for level in reversed(range(start, stop))
        for axis, ways in [(bucket.axes[level], bucket.sizes[level])]
        for packing in [packings.get(axis) if bucket.dtype.is_floating_point else None]
    )


def unowned(route: Sequence[Exchange], axes: Sequence[str]) -> tuple[Exchange, ...]:
    """A route without the sums over ``axes``: an optimizer makes those itself."""
    return tuple(exchange for exchange in route if exchange.op is not Collective.SUM or exchange.axis not in axes)


def tied_bytes(bucket: Bucket) -> int:
    """Bytes of a tied leaf's gradient that one of the bucket's homes sends to another home."""
    return bucket.size(bucket.levels) * bucket.reduce_dtype.itemsize


def share(whole: int, ways: int) -> int:
    """Bytes that one rank sends when ``whole`` bytes are all-gathered, or reduce-scattered, over ``ways`` ranks."""
    return whole * (ways - 1) // ways


def _reduced(bucket: Bucket, reductions: Reductions, sizes: Mapping[str, int]) -> Iterator[Exchange]:
    axes = (*bucket.axes, *bucket.replicas)
    for position, axis in enumerate(axes):
        ways, codec = sizes[axis], reductions.codecs.get(axis)
        level = position if position < bucket.levels else None
        later = {axis: sizes[axis] for axis in axes[position + 1 :]}
        channel = None if codec is None else Channel(bucket, axis, ways, codec, level, later=later)
        if level is not None:
            yield Exchange(bucket, axis, ways, Collective.SCATTER, level, level + 1, channel=channel)
        else:
            yield Exchange(bucket, axis, ways, Collective.SUM, bucket.levels, bucket.levels, channel=channel)


def _mean(bucket: Bucket, reductions: Reductions, sizes: Mapping[str, int]) -> Exchange | None:
    owner = reductions.owner
    if owner is None or sizes[owner.axis] == 1 or not bucket.trainable:
        return None
    channel = Channel(bucket, owner.axis, sizes[owner.axis], owner.codec, None, mean=True)
    return Exchange(
        bucket, owner.axis, sizes[owner.axis], Collective.SUM, bucket.levels, bucket.levels, channel=channel
    )

"""Compressed exchanges of gradients: one `Channel` for each bucket and axis, with the residuals that it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shardlib.collectives.codecs.base import BoundCodec, Codec, Kept, Rows
from shardlib.mesh.mesh import rank_of
from shardlib.mesh.specs import Leaf, P
from shardlib.plan.buckets import Bucket


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

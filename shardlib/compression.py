"""Where gradients travel in few bits: one `Channel` for each bucket and axis, with the errors it remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from shardlib.collectives.codecs import Codec, Rows, Wire
from shardlib.layout import Bucket
from shardlib.specs import Leaf, P


@dataclass(frozen=True)
class Channel:
    """A bucket's exchange over one axis.

    Attributes:
        level: the level at which it is split over the axis; None where the axis is one of its replicas.
        mean: whether it gives the mean over the axis, as an optimizer that owns the axis wants it; else the sum.
    """

    bucket: Bucket
    axis: str
    ways: int
    codec: Codec
    level: int | None
    mean: bool = False

    @property
    def elements(self) -> int:
        """Of the buffer that is exchanged."""
        return self.bucket.size(self.bucket.levels if self.level is None else self.level)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is encoded, and of errors: fp32, or float64 where gradients are."""
        return torch.float64 if self.bucket.reduce_dtype == torch.float64 else torch.float32

    @property
    def errors(self) -> tuple[str, ...]:
        """Names of the errors: of what this rank sends, and of the row it adds up for all."""
        if not self.codec.feedback:
            return ()
        name = f"{self.bucket.name}@{self.axis}"
        return (name,) if self.level is not None else (name, f"{name}/row")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each of the errors."""
        row = self._any_wire.row
        return (self.ways * row, row)[: len(self.errors)]

    @property
    def payload(self) -> int:
        """Bytes one rank sends."""
        first, second = self._any_wire.widths
        return (self.ways - 1) * (first + (second if self.level is None else 0))

    def wire(self, coords: Mapping[str, int]) -> Wire:
        """For the rank at these coordinates."""
        bucket, level = self.bucket, self.bucket.levels if self.level is None else self.level
        owners = bucket.parts(level)
        filled = bucket.filled(bucket.owner(coords, 0, level) * owners, owners)
        scattered = self.level is not None
        return self.codec.bind(
            Rows(self.ways, coords[self.axis], self.elements, filled, scattered, self.mean, self.dtype)
        )

    @cached_property
    def _any_wire(self) -> Wire:
        """Some rank's: their sizes are alike."""
        return self.wire(dict.fromkeys((*self.bucket.axes, self.axis), 0))

    def leaves(self, sizes: Mapping[str, int]) -> list[Leaf]:
        """The errors of all ranks: one row for each rank that has its own."""
        bucket = self.bucket
        if self.mean:  # of what was summed over all other axes
            later: tuple[str, ...] = (self.axis,)
        else:
            later = bucket.replicas[0 if self.level is not None else bucket.replicas.index(self.axis) :]
        own = {*bucket.slices, *bucket.axes, *later}
        axes = tuple(axis for axis in sizes if axis in own)
        rows = math.prod(sizes[axis] for axis in axes)
        return [Leaf(name, (rows, size), self.dtype, P(axes)) for name, size in zip(self.errors, self.sizes)]


def channels(bucket: Bucket, codecs: Mapping[str, Codec], sizes: Mapping[str, int]) -> list[Channel]:
    """Those of a bucket whose gradients are compressed over some axes."""
    split = [(axis, level) for level, axis in enumerate(bucket.axes)]
    found = [*split, *((axis, None) for axis in bucket.replicas)]
    return [Channel(bucket, axis, sizes[axis], codecs[axis], level) for axis, level in found if axis in codecs]

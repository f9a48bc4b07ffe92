"""Where gradients are compressed on their way: one `Channel` for each bucket and axis, with what it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from shardlib.collectives.codecs.base import BoundCodec, Codec, Kept, Rows
from shardlib.mesh.specs import Leaf, P
from shardlib.plan.buckets import Bucket


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
        """Of what is exchanged and kept: fp32, or float64 where gradients are."""
        return torch.float64 if self.bucket.reduce_dtype == torch.float64 else torch.float32

    @cached_property
    def keeps(self) -> dict[str, Kept]:
        """What stays from one exchange to the next, by its name in ``TrainState.comm``."""
        return {f"{self.bucket.name}@{self.axis}/{kept.kind}": kept for kept in self._any_bound.keeps}

    @property
    def bytes(self) -> int:
        """What one rank keeps."""
        return self.dtype.itemsize * sum(kept.elements for kept in self.keeps.values())

    @property
    def payload(self) -> int:
        """Bytes one rank sends."""
        return self._any_bound.payload

    def start(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What is kept before the first exchange, by name."""
        return dict(zip(self.keeps, self._any_bound.start(device), strict=True))

    def bind(self, coords: Mapping[str, int]) -> BoundCodec:
        """The codec bound to the buffer of the rank at these coordinates."""
        bucket, level = self.bucket, self.bucket.levels if self.level is None else self.level
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
            )
        )

    @cached_property
    def _any_bound(self) -> BoundCodec:
        """The bound codec of one rank. Its sizes are those of every rank's."""
        return self.bind(dict.fromkeys((*self.bucket.slices, *self.bucket.axes, self.axis), 0))

    def leaves(self, sizes: Mapping[str, int]) -> list[Leaf]:
        """What all ranks keep: one row for each rank that has its own."""
        found = []
        for name, kept in self.keeps.items():
            own = {*self.bucket.slices, *self.bucket.axes, *self._differing(kept)}
            axes = tuple(axis for axis in sizes if axis in own)
            rows = math.prod(sizes[axis] for axis in axes)
            found.append(Leaf(name, (rows, kept.elements), self.dtype, P(axes)))
        return found

    def _differing(self, kept: Kept) -> tuple[str, ...]:
        """Those of the axes that no leaf is split over whose ranks keep different ones."""
        equal = kept.kind == "factors"  # on all ranks of this axis
        if self.mean:  # of what was summed over all other axes
            return () if equal else (self.axis,)
        # Over the axes before this one what is exchanged is a sum already.
        return self.bucket.replicas[self.bucket.replicas.index(self.axis) + equal if self.level is None else 0 :]

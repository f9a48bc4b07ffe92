"""Moving buckets between levels: gathers towards whole, reductions towards what one rank owns.

Each starts at once and is finished by `wait`. Over several axes the first exchange is under way while the caller
goes on, and the others follow when it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Codec, Errors, Exchange, Item, Line
from shardlib.collectives.codecs.integers import Packing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel, channels


class Gather:
    """A leaf-major buffer of level ``stop`` on its way to level ``start``.

    Args:
        out: is filled, when given.
        packings: axis -> how values travel over it, where that is not as they are. A rank's own come out as the others'.

    Attributes:
        passed: level -> the buffer at that level, of those on the way that `wait` was through.
    """

    def __init__(
        self,
        mesh: Mesh,
        bucket: Bucket,
        buffer: torch.Tensor,
        start: int,
        stop: int,
        out: torch.Tensor | None = None,
        packings: Mapping[str, Packing] = MappingProxyType({}),
    ) -> None:
        self._mesh, self._bucket, self._start, self._packings = mesh, bucket, start, packings
        self._level, self._buffer, self._out = stop, buffer, out
        self.passed: dict[int, torch.Tensor] = {}
        self._launch()

    def _launch(self) -> None:
        """Send for the next level; what comes in rank by rank is put leaf by leaf, except where one leaf is alone."""
        self._level -= 1
        bucket, level = self._bucket, self._level
        axis, ways = bucket.axes[level], bucket.sizes[level]
        out = self._out if level == self._start else None
        whole = self._buffer.new_empty(bucket.size(level)) if out is None else out
        self._gathered = whole if bucket.alone else self._buffer.new_empty(whole.numel())
        packing = self._packings.get(axis) if bucket.dtype.is_floating_point else None
        self._packed: torch.Tensor | None = None
        if packing is None:
            self._work = primitives.all_gather(self._mesh, axis, self._gathered.view(ways, -1), self._buffer)
        else:
            message = packing.pack(self._buffer)
            self._packed = message.new_empty((ways, len(message)))
            self._work = primitives.all_gather(self._mesh, axis, self._packed, message)
        self._buffer = whole

    def _land(self) -> None:
        self._work.wait()
        bucket, level = self._bucket, self._level
        if self._packed is not None:
            rows = self._gathered.view(len(self._packed), -1)
            for message, row in zip(self._packed, rows, strict=True):
                self._packings[bucket.axes[level]].unpack(message, row)
            self._packed = None
        if not bucket.alone:
            ways = bucket.sizes[level]
            places = [place.view(ways, -1) for place in bucket.leaf_parts(self._buffer, level)]
            widths = [place.shape[1] for place in places]
            torch.split_with_sizes_copy(self._gathered.view(ways, -1), widths, dim=1, out=places)
        del self._gathered
        self.passed[level] = self._buffer

    def wait(self) -> torch.Tensor:
        """The gathered, leaf-major buffer (``out``, when given)."""
        self._land()
        while self._level > self._start:
            self._launch()
            self._land()
        return self._buffer


class Compression:
    """What one rank's reductions compress.

    Args:
        codecs: axis -> how what is summed over it travels, where that is not as it is.
    """

    def __init__(self, codecs: Mapping[str, Codec], mesh: Mesh) -> None:
        self.codecs, self._mesh = codecs, mesh
        self._channels: dict[tuple[str, str], tuple[Channel, Line]] = {}

    def item(self, bucket: Bucket, axis: str, buffer: torch.Tensor) -> Item[Line]:
        """A buffer on its way over a compressed axis; its memory is used up where it is the caller's own."""
        if (bucket.name, axis) not in self._channels:
            for channel in channels(bucket, self.codecs, self._mesh.shape):
                self._channels[bucket.name, channel.axis] = channel, channel.line(self._mesh.coords)
        channel, line = self._channels[bucket.name, axis]
        return Item(line, _own(line.pad(buffer.to(channel.dtype)), buffer, bucket), tuple(channel.keeps))


def _own(padded: torch.Tensor, buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Memory that may be used up, and that an error may be kept in."""
    if padded.data_ptr() != buffer.data_ptr():
        return padded
    # A gradient that was not packed may be somebody's tensor.
    return padded.clone() if bucket.alone else compact(padded)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """What may be kept: a part of something larger, all of which it would keep, is copied."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@dataclass
class Sum:
    """A bucket's rank-major buffer of partial sums; ``within``: leave each result in this rank's part of this buffer.

    ``within`` may be the buffer itself. It serves up to the first exchange in few bits.
    """

    bucket: Bucket
    buffer: torch.Tensor
    within: torch.Tensor | None = None


class Reduction:
    """Buckets' partial sums of level ``start`` on their way to level ``stop``: a unit's, which start together.

    Args:
        sums: all split over the same axes.
        axes: the axes, after that, over which they are summed on all ranks.
        compression: what is compressed, and
        errors: what that left out; written to.
    """

    def __init__(
        self,
        mesh: Mesh,
        sums: Sequence[Sum],
        start: int,
        stop: int,
        axes: Sequence[str],
        compression: Compression,
        errors: Errors,
    ) -> None:
        self._mesh, self._compression, self._errors = mesh, compression, errors
        self.sums = sums
        self._todo = [(axis, True) for axis in sums[0].bucket.axes[start:stop]] + [(axis, False) for axis in axes]
        self._launch()

    def _launch(self) -> None:
        self._works: list[primitives.Work] = []
        self._compressed: Exchange | None = None
        self._under_way = bool(self._todo)
        if not self._todo:
            return
        axis, scatter = self._todo.pop(0)
        if axis in self._compression.codecs:
            items = [self._compression.item(part.bucket, axis, part.buffer) for part in self.sums]
            self._compressed = self._compression.codecs[axis].exchange(self._mesh, axis, items, self._errors)
            for part in self.sums:
                part.within = None  # what comes in is decoded into memory of its own, and this may hold an error by now
        elif scatter:
            self._works = [self._scatter(axis, part) for part in self.sums]
        else:
            self._works = [primitives.all_reduce(self._mesh, axis, part.buffer) for part in self.sums]

    def _scatter(self, axis: str, part: Sum) -> primitives.Work:
        inp, size = part.buffer, self._mesh.shape[axis]
        if part.within is None:
            part.buffer = inp.new_empty(inp.numel() // size)
        else:
            part.buffer = part.within = part.within.view(size, -1)[self._mesh.coords[axis]]
        return primitives.reduce_scatter(self._mesh, axis, part.buffer, inp)

    def wait(self) -> Sequence[Sum]:
        """The sums, their buffers now at level ``stop``."""
        while self._under_way:
            for work in self._works:
                work.wait()
            if self._compressed is not None:
                for part, result in zip(self.sums, self._compressed.wait(), strict=True):
                    part.buffer = result.to(part.bucket.reduce_dtype)
            self._launch()
        return self.sums

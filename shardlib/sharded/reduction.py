"""Buckets' partial sums on their way to what one rank owns, along a route of scatters and sums.

The first exchange starts at once, and is under way while the caller goes on; the others follow when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Errors, Item, Line
from shardlib.collectives.codecs.base import Exchange as CompressedSum
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel
from shardlib.plan.exchanges import Exchange, Op


class Lines:
    """One rank's lines: its channels' codecs, each bound to this rank's part of a bucket."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lines: dict[tuple[str, str], Line] = {}

    def item(self, channel: Channel, buffer: torch.Tensor) -> Item[Line]:
        """A buffer on its way through a channel; its memory is used up where it is the caller's own."""
        key = channel.bucket.name, channel.axis
        if key not in self._lines:
            self._lines[key] = channel.bind(self._mesh.coords)
        line = self._lines[key]
        return Item(line, _own(line.pad(buffer.to(channel.dtype)), buffer, channel.bucket), tuple(channel.keeps))


def _own(padded: torch.Tensor, buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Memory that may be used up, and that a residual may be kept in."""
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
    """Buckets' partial sums on their way: a unit's, which start together.

    Args:
        sums: all split and summed over the same axes.
        routes: of each of them.
        lines: how channels' values travel, and
        errors: what that left out; written to.
    """

    def __init__(
        self, mesh: Mesh, sums: Sequence[Sum], routes: Sequence[Sequence[Exchange]], lines: Lines, errors: Errors
    ) -> None:
        self._mesh, self._lines, self._errors = mesh, lines, errors
        self.sums = sums
        self._todo = list(zip(*routes, strict=True))
        self._launch()

    def _launch(self) -> None:
        self._works: list[primitives.Work] = []
        self._compressed: CompressedSum | None = None
        self._under_way = bool(self._todo)
        if not self._todo:
            return
        exchanges = self._todo.pop(0)
        first, axis = exchanges[0], exchanges[0].axis
        if first.channel is not None:
            channels = [exchange.channel for exchange in exchanges if exchange.channel]
            items = [self._lines.item(channel, part.buffer) for channel, part in zip(channels, self.sums, strict=True)]
            self._compressed = first.channel.codec.exchange(self._mesh, axis, items, self._errors)
            for part in self.sums:
                part.within = (
                    None  # what comes in is decoded into memory of its own, and this may hold a residual by now
                )
        elif first.op is Op.SCATTER:
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
        """The sums, their buffers now at the end of their routes."""
        while self._under_way:
            for work in self._works:
                work.wait()
            if self._compressed is not None:
                for part, result in zip(self.sums, self._compressed.wait(), strict=True):
                    part.buffer = result.to(part.bucket.reduce_dtype)
            self._launch()
        return self.sums

"""The reduction of buckets' partial sums to what one rank owns, along a route of reduce-scatters and all-reduces.

The first exchange starts at once and runs while the caller computes. The others follow when the caller lets it go on, or
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import BoundCodec, Item, Residuals
from shardlib.collectives.codecs.base import SumsUnderWay as CompressedSum
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel, Collective, Exchange


class BoundCodecs:
    """This rank's codecs: one for each channel, bound at its first exchange."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._bound: dict[tuple[str, str], BoundCodec] = {}

    def item(self, channel: Channel, buffer: torch.Tensor) -> Item[BoundCodec]:
        """The item of a channel's exchange that sums ``buffer``, whose memory may be used up (see `Bucket.alone`)."""
        key = channel.bucket.name, channel.axis
        if key not in self._bound:
            self._bound[key] = channel.bind(self._mesh.coords)
        bound = self._bound[key]
        return Item(bound, _writable(bound.pad(buffer.to(channel.dtype)), buffer, channel.bucket), tuple(channel.keeps))


def _writable(padded: torch.Tensor, buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """``padded``, in memory that an exchange may overwrite and keep a residual in."""
    if padded.data_ptr() != buffer.data_ptr():
        return padded
    # A gradient that was not packed may be a tensor that the user holds.
    return padded.clone() if bucket.alone else compact(padded)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy if it is a view of a larger storage, so that keeping it keeps no more memory than its own."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@dataclass
class Sum:
    """A bucket's partial sums.

    Attributes:
        bucket: the bucket.
        buffer: the partial sums, rank-major; after each exchange of the route its result.
        within: a buffer in whose range for this rank each result is left, up to the first compressed exchange; may be
            ``buffer`` itself. None for new memory.
    """

    bucket: Bucket
    buffer: torch.Tensor
    within: torch.Tensor | None = None


class Reduction:
    """The reduction of a unit's buckets, which start together.

    Args:
        sums: the buckets' partial sums, all split and summed over the same axes.
        routes: the exchanges of each of them.
        codecs: the codecs of this rank's channels.
        residuals: the tensors that these keep, which the exchanges replace.
    """

    def __init__(
        self,
        mesh: Mesh,
        sums: Sequence[Sum],
        routes: Sequence[Sequence[Exchange]],
        codecs: BoundCodecs,
        residuals: Residuals,
    ) -> None:
        self._mesh, self._codecs, self._residuals = mesh, codecs, residuals
        self.sums = sums
        self._todo = list(zip(*routes, strict=True))
        self._label = f"the gradient of {sums[0].bucket.label}" if sums else ""
        self._launch()

    def _launch(self) -> None:
        self._works: list[primitives.Work] = []
        self._sent: list[torch.Tensor] = []  # what the exchange under way reads
        self._compressed: CompressedSum | None = None
        self._under_way = bool(self._todo)
        if not self._todo:
            return
        exchanges = self._todo.pop(0)
        with naming(self._label):
            self._start(exchanges)

    def _start(self, exchanges: Sequence[Exchange]) -> None:
        first, axis = exchanges[0], exchanges[0].axis
        if first.channel is not None:
            channels = [exchange.channel for exchange in exchanges if exchange.channel]
            items = [
                self._codecs.item(channel, partial.buffer) for channel, partial in zip(channels, self.sums, strict=True)
            ]
            self._compressed = first.channel.codec.exchange(self._mesh, axis, items, self._residuals)
            for partial in self.sums:
                partial.within = None  # messages are decoded into new memory, and this may hold a residual by now
        elif first.op is Collective.SCATTER:
            self._sent = [partial.buffer for partial in self.sums]
            self._works = [self._scatter(axis, partial) for partial in self.sums]
        else:
            self._works = [primitives.all_reduce(self._mesh, axis, partial.buffer) for partial in self.sums]

    def _scatter(self, axis: str, partial: Sum) -> primitives.Work:
        inp, size = partial.buffer, self._mesh.shape[axis]
        if partial.within is None:
            partial.buffer = inp.new_empty(inp.numel() // size)
        else:
            partial.buffer = partial.within = partial.within.view(size, -1)[self._mesh.coords[axis]]
        return primitives.reduce_scatter(self._mesh, axis, partial.buffer, inp)

    @property
    def complete(self) -> bool:
        """Whether no exchange is left, so that `wait` returns at once."""
        return not self._under_way

    @property
    def more(self) -> bool:
        """Whether exchanges of the route are left to start."""
        return bool(self._todo)

    def go_on(self) -> None:
        """Start the next exchange of the route, if there is one, as soon as the one under way has ended."""
        if self._todo:
            self._end()
            self._launch()

    def wait(self) -> Sequence[Sum]:
        """The sums, each ``buffer`` now the result of its whole route."""
        while self._under_way:
            self._end()
            self._launch()
        return self.sums

    def _end(self) -> None:
        """Wait for the exchange that is under way."""
        for work in self._works:
            work.wait()
        if self._compressed is not None:
            for partial, result in zip(self.sums, self._compressed.wait(), strict=True):
                partial.buffer = result.to(partial.bucket.reduce_dtype)

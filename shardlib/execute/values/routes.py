"""A bucket's exchanges that are more than one collective of what is there, as operators that a graph has as nodes.

`FETCH` brings parameters from another memory to the device and gathers them, packed where the plan says so. `REDUCE` sums
gradients by a codec: what the codec keeps is given to it and returned, so that nothing is kept beside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives.buffers import Link, link_of
from shardlib.collectives.codecs.base import Residuals
from shardlib.kernels.common.operators import opaque
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange
from shardlib.sharded.gather import Gather
from shardlib.sharded.on_disk import BufferOnDisk
from shardlib.sharded.reduction import BoundCodecs, Reduction, Sum


class Way(Link):
    """What a stored buffer goes along until it is whole on the device, or the next part of that.

    Attributes:
        route: one gather; none for a buffer that comes from another memory and is whole there.
        elements: of the result, leaf-major.
        announced: whether buffers are read from disk, and are to be announced before.
    """

    def __init__(self, mesh: Mesh, bucket: Bucket, exchange: Exchange | None, first: bool, stays: bool) -> None:
        super().__init__(mesh, exchange.axis if exchange else "", bucket.label, stays)
        self.route = [exchange] if exchange else []
        self.elements = bucket.size(exchange.target if exchange else 0)
        self.announced = first and MEMORIES[bucket.memory.param].rests


class Channeled(Link):
    """What a buffer of partial sums goes along in a codec."""

    def __init__(self, mesh: Mesh, exchange: Exchange, codecs: BoundCodecs) -> None:
        super().__init__(mesh, exchange.axis, f"the gradient of {exchange.bucket.label}")
        assert exchange.channel is not None
        self.exchange, self._codecs, self.kept = exchange, codecs, tuple(exchange.channel.keeps)

    def started(self, x: torch.Tensor, kept: Sequence[torch.Tensor]) -> Reducing:
        residuals = Residuals(dict(zip(self.kept, kept, strict=True)))
        sums = [Sum(self.exchange.bucket, x)]
        return Reducing(Reduction(self.mesh, sums, [[self.exchange]], self._codecs, residuals), residuals)


class Reducing:
    """A sum under way, with what its codec keeps."""

    def __init__(self, reduction: Reduction, residuals: Residuals) -> None:
        self._reduction, self._residuals = reduction, residuals

    def wait(self) -> list[torch.Tensor]:
        """The sum, and what is kept for the next one. Call it once."""
        (summed,) = self._reduction.wait()
        return [summed.buffer, *self._residuals.after.values()]


def start_fetch(x: torch.Tensor | BufferOnDisk, number: int) -> Gather:
    """Start what `FETCH` does."""
    link: Way = link_of(number)  # type: ignore[assignment]
    with naming(link.label):
        return x.gather(link.route) if isinstance(x, BufferOnDisk) else Gather(link.mesh, link.route, x)


def start_reduce(x: torch.Tensor, number: int, kept: Sequence[torch.Tensor]) -> Reducing:
    """Start what `REDUCE` does. Uses up ``x``."""
    link: Channeled = link_of(number)  # type: ignore[assignment]
    return link.started(x, kept)


def announce(*stored: BufferOnDisk) -> None:
    """Begin to read buffers that will be fetched."""
    for buffer in stored:
        buffer.announce()


def _fetch(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    return [start_fetch(x, link).wait()]


def _fetched(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    way: Way = link_of(link)  # type: ignore[assignment]
    return [torch.empty(way.elements, dtype=x.dtype, device=way.mesh.device)]


def _reduce(x: torch.Tensor, link: int, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return start_reduce(x.clone(), link, kept).wait()


def _reduced(x: torch.Tensor, link: int, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    exchange = link_of(link).exchange  # type: ignore[attr-defined]
    return [x.new_empty(exchange.bucket.size(exchange.target)), *map(torch.empty_like, kept)]


FETCH = opaque("fetch_buffer", _fetch, _fetched)
REDUCE = opaque("reduce_buffer", _reduce, _reduced)

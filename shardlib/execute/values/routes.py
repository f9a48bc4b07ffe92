"""A bucket's exchanges that are more than one collective of what is there, as operators that a graph has as nodes.

`FETCH` brings parameters from another memory to the device and gathers them, packed where the plan says so. `REDUCE` sums
gradients by a codec: what the codec keeps is given to it and returned, so that nothing is kept beside a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlib.collectives.buffers import AxisLink, link_of, scattered, summed
from shardlib.collectives.codecs.base import Residuals
from shardlib.kernels.common.operators import opaque
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Collective, Exchange
from shardlib.sharded.gather import Gather
from shardlib.sharded.on_disk import BufferOnDisk
from shardlib.sharded.reduction import BoundCodecs, Reduction, Sum

Route = Sequence[Exchange]


class Fetching(AxisLink):
    """What a stored buffer goes along until it is whole on the device, or the next part of that.

    Attributes:
        route: one gather; none for a buffer that comes from another memory and is whole there.
        elements: of the result, leaf-major.
        announced: whether buffers are read from disk, and are to be announced before.
    """

    def __init__(self, mesh: Mesh, bucket: Bucket, exchange: Exchange | None, first: bool, stays: bool) -> None:
        super().__init__(mesh, exchange.axis if exchange else "", bucket.label, stays, bucket.home is not None)
        self.route = [exchange] if exchange else []
        self.elements = bucket.size(exchange.target if exchange else 0)
        self.announced = first and MEMORIES[bucket.memory.param].rests


class CodedSums(AxisLink):
    """What buffers of partial sums go along in a codec, in one message.

    Attributes:
        exchanges: of each buffer.
        kept: the names of what the codec keeps.
    """

    def __init__(self, mesh: Mesh, exchanges: Sequence[Exchange], codecs: BoundCodecs) -> None:
        first = exchanges[0]
        super().__init__(mesh, first.axis, f"the gradient of {first.bucket.label}")
        self.exchanges, self._codecs = exchanges, codecs
        self.kept = [name for each in exchanges if each.channel for name in each.channel.keeps]

    def started(self, buffers: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> Reducing:
        residuals = Residuals(dict(zip(self.kept, kept, strict=True)))
        sums = [Sum(each.bucket, buffer) for each, buffer in zip(self.exchanges, buffers, strict=True)]
        routes = [[each] for each in self.exchanges]
        return Reducing(Reduction(self.mesh, sums, routes, self._codecs, residuals), residuals)


class Reducing:
    """Sums under way, with what their codec keeps."""

    def __init__(self, reduction: Reduction, residuals: Residuals) -> None:
        self._reduction, self._residuals = reduction, residuals

    def wait(self) -> list[torch.Tensor]:
        """The sums, and what is kept for the next ones. Call it once."""
        sums = self._reduction.wait()
        return [*(each.buffer for each in sums), *self._residuals.after.values()]


def start_fetch(x: torch.Tensor | BufferOnDisk, number: int) -> Gather:
    """Start what `FETCH` does."""
    link: Fetching = link_of(number)  # type: ignore[assignment]
    with naming(link.label):
        return x.gather(link.route) if isinstance(x, BufferOnDisk) else Gather(link.mesh, link.route, x)


def start_reduce(buffers: Sequence[torch.Tensor], number: int, kept: Sequence[torch.Tensor]) -> Reducing:
    """Start what `REDUCE` does. Uses up ``buffers``."""
    link: CodedSums = link_of(number)  # type: ignore[assignment]
    return link.started(buffers, kept)


def announce(*stored: BufferOnDisk) -> None:
    """Begin to read buffers that will be fetched."""
    for buffer in stored:
        buffer.announce()


def _fetch(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    return [start_fetch(x, link).wait()]


def _fetched(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    way: Fetching = link_of(link)  # type: ignore[assignment]
    return [torch.empty(way.elements, dtype=x.dtype, device=way.mesh.device)]


def _reduce(buffers: Sequence[torch.Tensor], link: int, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return start_reduce([buffer.clone() for buffer in buffers], link, kept).wait()


def _reduced(buffers: Sequence[torch.Tensor], link: int, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    exchanges: Sequence[Exchange] = link_of(link).exchanges  # type: ignore[attr-defined]
    sizes = (each.bucket.size(each.target) for each in exchanges)
    sums = [buffer.new_empty(size) for buffer, size in zip(buffers, sizes, strict=True)]
    return [*sums, *map(torch.empty_like, kept)]


FETCH = opaque("fetch_buffer", _fetch, _fetched)
REDUCE = opaque("reduce_buffer", _reduce, _reduced)


class UnitSums:
    """The exchanges of gradients of one unit whose buckets' routes have the same collectives.

    Attributes:
        names: the buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], routes: Sequence[Route], mesh: Mesh, codecs: BoundCodecs) -> None:
        self.names = [bucket.name for bucket in buckets]
        self._steps = [
            (each[0].op, each[0].axis, CodedSums(mesh, each, codecs) if each[0].channel else bound(each, mesh))
            for each in zip(*routes, strict=True)
        ]

    def __call__(
        self, gradients: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor], unreduced: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """The sums by name, but for those over axes that are left ``unreduced``. Replaces what codecs have ``kept``."""
        buffers = [gradients[name] for name in self.names]
        for op, axis, links in self._steps:
            if op is Collective.SUM and axis in unreduced:
                continue
            if isinstance(links, CodedSums):
                sums = REDUCE(buffers, links.number, [kept[name] for name in links.kept])
                buffers, after = sums[: len(buffers)], sums[len(buffers) :]
                kept |= zip(links.kept, after, strict=True)
            else:
                buffers = [along([link], buffer) for link, buffer in zip(links, buffers, strict=True)]
        return dict(zip(self.names, buffers, strict=True))


def unit_sums(routes: Mapping[Bucket, Route], mesh: Mesh, codecs: BoundCodecs) -> list[UnitSums]:
    """The exchanges of buckets along their routes."""
    groups: dict[Any, list[Bucket]] = {}
    for bucket, route in routes.items():
        groups.setdefault((bucket.unit, *((each.op, each.axis) for each in route)), []).append(bucket)
    return [UnitSums(group, [routes[bucket] for bucket in group], mesh, codecs) for group in groups.values()]


def bound(route: Route, mesh: Mesh) -> list[tuple[Collective, AxisLink]]:
    """Exchanges of gradients, without codecs, on a mesh."""
    return [
        (each.op, AxisLink(mesh, each.axis, f"the gradient of {each.bucket.label}", tile=each.bucket.home is not None))
        for each in route
    ]


def along(route: Sequence[tuple[Collective, AxisLink]], buffer: torch.Tensor) -> torch.Tensor:
    """What exchanges make of a gradient, one after the other."""
    for op, link in route:
        buffer = scattered(buffer, link) if op is Collective.SCATTER else summed(buffer, link)
    return buffer

"""A bucket's whole leaves as a differentiable function of this rank's shard, and its gradient's way to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlib.collectives.buffers import AxisLink, gathered, link_of, scattered, summed
from shardlib.collectives.codecs.base import Residuals
from shardlib.common._compat import split_copied
from shardlib.kernels.common.operators import opaque
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Collective, Exchange, Routes
from shardlib.sharded.gather import Gather
from shardlib.sharded.params_on_disk import BufferOnDisk
from shardlib.sharded.reduction import BoundCodecs, Reduction, Sum

# A bucket's exchanges that are more than one collective of what is there, as operators that a graph has as nodes.
# `FETCH` brings parameters from another memory to the device and gathers them, packed where the plan says so. `REDUCE` sums
# gradients by a codec: what the codec keeps is given to it and returned, so that nothing is kept beside a graph.


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
        self.route: list[Exchange] = [exchange] if exchange else []
        self.elements: int = bucket.size(exchange.target if exchange else 0)
        self.announced: bool = first and MEMORIES[bucket.memory.param].rests


class CodedSums(AxisLink):
    """What buffers of partial sums go along in a codec, in one message.

    Attributes:
        exchanges: of each buffer.
        kept: the names of what the codec keeps.
    """

    exchanges: Sequence[Exchange]

    def __init__(self, mesh: Mesh, exchanges: Sequence[Exchange], codecs: BoundCodecs) -> None:
        first = exchanges[0]
        super().__init__(mesh, first.axis, f"the gradient of {first.bucket.label}")
        self.exchanges, self._codecs = exchanges, codecs
        self.kept: list[str] = [name for each in exchanges if each.channel for name in each.channel.keeps]

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
        self.names: list[str] = [bucket.name for bucket in buckets]
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


class Wholes:
    """The exchanges of one bucket, bound to a mesh.

    Args:
        kept: whether the leaves stay gathered until backward.

    Attributes:
        bucket: the bucket.
        coded: whether gradients are summed by a codec before they are accumulated.
        reached: the paths of leaves that had a gradient in a backward, if only zeros.
    """

    bucket: Bucket
    mesh: Mesh

    def __init__(self, bucket: Bucket, routes: Routes, mesh: Mesh, kept: bool) -> None:
        self.bucket, self.mesh = bucket, mesh
        self.reached: set[str] = set()
        memory, staying = bucket.memory.param, len(routes.gather) - (0 if kept else len(routes.again))
        comes = MEMORIES[memory].rests or (mesh.transfers.apart and memory != "device")
        self._fetches = comes or any(exchange.packing for exchange in routes.gather)
        ways: Sequence[Exchange | None] = routes.gather or ([None] if comes else [])
        self._gathers = [
            Fetching(mesh, bucket, exchange, not number, number < staying)
            if exchange is None or self._fetches
            else AxisLink(mesh, exchange.axis, bucket.label, number < staying, bucket.home is not None)
            for number, exchange in enumerate(ways)
        ]
        # A codec keeps residuals, for which autograd's backward has no place.
        self.coded: bool = any(exchange.channel for exchange in routes.each)
        self._each = [] if self.coded else bound(routes.each, mesh)
        # From a whole gradient to the layout of the parameters.
        self._to_stored = bound(routes.reductions[: bucket.param_level], mesh)
        self._sums = [
            AxisLink(mesh, exchange.axis, f"the gradient of {bucket.label}")
            for exchange in routes.reductions[bucket.param_level :]
        ]

    def slot(self) -> torch.Tensor:
        """The zero that is added to the parameters, in the layout and dtype in which gradients are summed over micro-batches.
        It has no memory. The gradient with respect to it is the parameters' own, there and in that dtype."""
        zero = torch.zeros((), dtype=self.bucket.reduce_dtype, device=self.mesh.device)
        return zero.expand(self.bucket.size(0 if self.coded else self.bucket.grad_level))

    def leaves(self, stored: torch.Tensor, slot: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The whole leaves at ``stored + slot``."""
        if self.bucket.trainable:
            return _Leaves.apply(stored, slot, self)
        return tuple(self.unpacked(self.gather(stored)))

    def gather(self, stored: torch.Tensor) -> torch.Tensor:
        """The whole buffer, each owner's elements of all leaves in one piece (leaf by leaf, if it is fetched), from this
        rank's."""
        for link in self._gathers:
            stored = FETCH(stored, link.number)[0] if self._fetches else gathered(stored, link)
        return stored

    def unpacked(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of what `gather` returns, in shape and without padding."""
        bucket, level = self.bucket, self.bucket.param_level
        cut: Sequence[torch.Tensor] = [whole]
        if self._fetches:
            cut = whole.split(bucket.segment_sizes(0))
        elif not bucket.alone:
            columns, sizes = whole.view(math.prod(bucket.sizes[:level]), -1), bucket.segment_sizes(level)
            # One copy of all leaves where their elements lie apart, else views.
            apart = len(columns) > 1
            cut = split_copied(columns, sizes, 1) if apart else columns.split(sizes, dim=1)
        return [
            part.view(shape) if part.numel() == numel else part.view(-1)[:numel].view(shape)
            for part, numel, shape in zip(cut, bucket.numels, bucket.shapes, strict=True)
        ]

    def each(self, whole: torch.Tensor) -> torch.Tensor:
        """One micro-batch's whole gradient, summed as far as gradients are before they are accumulated; as it is, where that
        takes a codec."""
        return along(self._each, whole)

    def expanded(self, slot: torch.Tensor) -> torch.Tensor:
        """What `each` is the dual of: a tensor in the layout of gradients, whole."""
        for op, link in reversed(self._each):
            slot = gathered(slot, link) if op is Collective.SCATTER else slot
        return slot

    def to_stored(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole gradient, summed over all ranks, in the layout and dtype of the parameters."""
        bucket, level = self.bucket, self.bucket.param_level
        reduced = along(self._to_stored, whole)
        for link in self._sums:
            reduced = summed(reduced, link)
        columns = reduced.view(bucket.owners(level), -1).split(bucket.chunks, dim=1)
        return torch.cat([column.reshape(-1) for column in columns]).to(bucket.dtype)


class _Leaves(torch.autograd.Function):
    """`Wholes.leaves`. Backward packs the gradients of all leaves and reduces them, once: to the slot's layout within a
    step, and to the parameters' where torch.func differentiates around it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(stored: torch.Tensor, slot: torch.Tensor | None, of: Wholes) -> tuple[torch.Tensor, ...]:
        return tuple(of.unpacked(of.gather(stored)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.of = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return None, None, None
        of: Wholes = ctx.of
        of.reached.update(path for path, grad in zip(of.bucket.paths, grads, strict=True) if grad is not None)
        to_stored, to_slot, _ = ctx.needs_input_grad
        whole = of.bucket.pack(grads, of.bucket.reduce_dtype)
        return (of.to_stored(whole) if to_stored else None), (of.each(whole) if to_slot else None), None

    @staticmethod
    def jvp(
        ctx: Any, stored: torch.Tensor | None, slot: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        of: Wholes = ctx.of
        bucket = of.bucket
        tangents = [torch.zeros(shape, dtype=bucket.dtype, device=of.mesh.device) for shape in bucket.shapes]
        if stored is not None:
            tangents = of.unpacked(of.gather(stored))
        if slot is not None:
            added = bucket.unpack(of.expanded(slot).to(bucket.dtype))
            tangents = [one + other for one, other in zip(tangents, added, strict=True)]
        return tuple(tangents)

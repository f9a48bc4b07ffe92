"""A bucket's whole leaves as a differentiable function of this rank's shard, and its gradient's way to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.collectives.buffers import AxisLink, gathered, summed
from shardlib.common._compat import split_copied
from shardlib.execute.values.routes import FETCH, Fetching, along, bound
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Collective, Exchange, Routes


class Wholes:
    """The exchanges of one bucket, bound to a mesh.

    Args:
        kept: whether the leaves stay gathered until backward.

    Attributes:
        bucket: the bucket.
        coded: whether gradients are summed by a codec before they are accumulated.
        reached: the paths of leaves that had a gradient in a backward, if only zeros.
    """

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
        self.coded = any(exchange.channel for exchange in routes.each)
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

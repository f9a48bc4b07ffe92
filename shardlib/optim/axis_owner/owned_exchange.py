"""Compressed means over the axis that an optimizer owns."""

from __future__ import annotations

from functools import cached_property

import torch

from shardlib.collectives.codecs.base import BoundCodec, Item, Residuals, SumsUnderWay
from shardlib.common.thresholds import Threshold
from shardlib.mesh.mesh import Mesh
from shardlib.plan.exchanges import Channel
from shardlib.plan.plan import Plan
from shardlib.sharded.reduction import compact

# Elements from which an exchange takes no further bucket. Every exchange costs 1 to 2 ms on gloo; but with several, one is
# encoded while another is under way, which is free on a slow network.
_FULL = Threshold(1 << 22)


class OwnedExchange:
    """The exchanges over the axis that an optimizer owns: see `shardlib.plan.claims.AxisOwner`."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        assert plan.reductions.owner is not None
        self._plan, self._mesh, self._owned = plan, mesh, plan.reductions.owner

    @cached_property
    def _bound(self) -> dict[str, tuple[Channel, BoundCodec]]:
        """Bucket name -> channel and bound codec.

        Made at the first exchange, since codecs hold tables with values, and a step that is traced with fake tensors may not
        make any.
        """
        means = [self._plan.routes[bucket.name].mean for bucket in self._plan.trained]
        channels = [mean.channel for mean in means if mean and mean.channel]
        return {channel.bucket.name: (channel, channel.bind(self._mesh.coords)) for channel in channels}

    def mean(
        self, tree: dict[str, torch.Tensor], residuals: Residuals, out: dict[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """The means of ``tree`` over the axis; in ``out``, if given. The memory of both may be used up.

        An exchange has several buckets. All exchanges start before the first is waited for.
        """
        groups: list[list[str]] = [[]]
        for name in tree:
            if sum(tree[other].numel() for other in groups[-1]) >= _FULL():
                groups.append([])
            if name in self._bound:
                groups[-1].append(name)
        started = [(names, self._start([(name, tree[name]) for name in names], residuals)) for names in groups if names]
        means = dict(tree)
        for names, exchange in started:
            outs = [None if out is None else out[name] for name in names]
            for name, result in zip(names, exchange.wait(outs), strict=True):
                means[name] = result.to(tree[name].dtype)
        return {name: compact(mean) for name, mean in means.items()}  # optimizers keep them

    def _start(self, buffers: list[tuple[str, torch.Tensor]], residuals: Residuals) -> SumsUnderWay:
        items = []
        for name, buffer in buffers:
            channel, bound = self._bound[name]
            items.append(Item(bound, compact(bound.pad(buffer.to(channel.dtype))), tuple(channel.keeps)))
        return self._owned.codec.exchange(self._mesh, self._owned.axis, items, residuals)

    def reset(self, residuals: Residuals) -> None:
        """Replace the kept tensors of all exchanges by their initial values."""
        for channel, _ in self._bound.values():
            residuals.after |= channel.start(self._mesh.device)

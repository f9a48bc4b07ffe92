"""The compressed means of an optimizer that sums over an axis itself."""

from __future__ import annotations

from functools import cached_property

import torch

from shardlib.collectives.codecs.base import Errors, Exchange, Item, Line
from shardlib.kernels.common.thresholds import Threshold
from shardlib.mesh.mesh import Mesh
from shardlib.plan.channels import Channel
from shardlib.plan.plan import Plan
from shardlib.sharded.reduction import compact

# Elements from which an exchange is large enough: two fewer cost 1 to 2 ms on gloo, and on a slow network what is encoded
# while another is under way costs nothing.
_TOGETHER = Threshold(1 << 22)


class OwnExchange:
    """The compressed means of an optimizer that owns an axis; see `shardlib.plan.claims.AxisOwner`."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        assert plan.reductions.owner is not None
        self._plan, self._mesh, self._owned = plan, mesh, plan.reductions.owner

    @cached_property
    def _lines(self) -> dict[str, tuple[Channel, Line]]:
        """By bucket. Made at the first exchange: their tables have values, which a step that is only traced must not."""
        means = [self._plan.routes[bucket.name].mean for bucket in self._plan.trained]
        channels = [mean.channel for mean in means if mean and mean.channel]
        return {channel.bucket.name: (channel, channel.bind(self._mesh.coords)) for channel in channels}

    def mean(
        self, tree: dict[str, torch.Tensor], errors: Errors, out: dict[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """Several buckets to an exchange; all are under way before the first is waited for."""
        groups: list[list[str]] = [[]]
        for name in tree:
            if sum(tree[other].numel() for other in groups[-1]) >= _TOGETHER():
                groups.append([])
            if name in self._lines:
                groups[-1].append(name)
        started = [(names, self._start([(name, tree[name]) for name in names], errors)) for names in groups if names]
        found = dict(tree)
        for names, exchange in started:
            places = [None if out is None else out[name] for name in names]
            for name, result in zip(names, exchange.wait(places), strict=True):
                found[name] = result.to(tree[name].dtype)
        return {name: compact(mean) for name, mean in found.items()}  # optimizers keep it

    def _start(self, buffers: list[tuple[str, torch.Tensor]], errors: Errors) -> Exchange:
        items = []
        for name, buffer in buffers:
            channel, line = self._lines[name]
            items.append(Item(line, compact(line.pad(buffer.to(channel.dtype))), tuple(channel.keeps)))
        return self._owned.codec.exchange(self._mesh, self._owned.axis, items, errors)

    def reset(self, errors: Errors) -> None:
        for channel, _ in self._lines.values():
            errors.after |= channel.start(self._mesh.device)

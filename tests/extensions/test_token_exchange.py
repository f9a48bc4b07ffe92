"""A user's own token exchange: every rank gathers all rows, and the results of each are summed where its token is."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers.few_experts import model
from helpers.stages import ADAMW, check_like_one_device, plan_of

import shardlib as sl
from shardlib.collectives.tokens import Payload, TokenExchange
from shardlib.errors import IllegalComposition


class Gathered(NamedTuple):
    """Rows that have been gathered: those of this rank's experts come first, by expert; ``order`` has their old places."""

    rows: Any
    ends: Any
    order: Any

    @property
    def arriving(self):
        return len(self.order)

    def wait(self):
        return self.rows


@dataclass(frozen=True)
class Everywhere(TokenExchange):
    """For few ranks or few tokens: sizes do not depend on counts, so nothing is padded and no host waits."""

    axis: str
    name = "everywhere"

    @property
    def axes(self):
        return (self.axis,)

    def send(self, mesh, rows, counts, *, slots=None, anchor=None):
        if anchor is not None:  # backward runs on ranks whose rows need no gradient, too
            rows = rows + 0 * anchor.flatten()[0]
        everyone = torch.reshape(sl.collectives.all_gather(counts, self.axis, mesh=mesh), (mesh.shape[self.axis], -1))
        share = len(counts) // mesh.shape[self.axis]
        numbers = torch.arange(len(rows)).repeat(len(everyone), 1)
        owners = torch.searchsorted(everyone.cumsum(1), numbers, right=True)
        mine = owners.flatten() - share * mesh.coords[self.axis]  # the number of a row's expert among this rank's
        order = mine.where((mine >= 0) & (mine < share), share).argsort(stable=True)
        ends = everyone.sum(0)[share * mesh.coords[self.axis] :][:share].cumsum(0)
        way = Gathered(sl.collectives.all_gather(rows, self.axis, mesh=mesh)[order], ends, order)
        return way, way

    def back(self, mesh, rows, way):
        rows = rows.where(torch.arange(len(rows))[:, None] < way.ends[-1], 0)
        placed = torch.zeros_like(rows).index_copy(0, way.order, rows)
        return way._replace(rows=sl.collectives.reduce_scatter(placed, self.axis, mesh=mesh))

    def payload(self, sizes, coords, counts, width, dtype, *, slots=None):
        return self.bound(sizes, int(counts[coords[self.axis]].sum()), counts.shape[1], width, dtype)

    def bound(self, sizes, rows, experts, width, dtype, *, slots=None):
        others, row = sizes[self.axis] - 1, width * dtype.itemsize
        return Payload({self.axis: others * experts * 8}, *[{self.axis: others * rows * row}] * 2)


TRANSFORM = sl.experts("data", kind=Everywhere)


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    check_like_one_device(model, TRANSFORM, tmp_path, pool)
    plan = plan_of(model, TRANSFORM, ADAMW, 2)
    assert f"experts('data', kind={__name__}.Everywhere)" in str(plan)
    counts = torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 4], [0, 2, 2, 0]])
    payload = plan.step.tokens.payload(plan.sizes, {"data": 1}, counts, 5, torch.float64)
    assert payload == plan.step.tokens.bound(plan.sizes, 4, 4, 5, torch.float64)
    assert plan.payload()["data"] > sum(payload.forward.values()) + sum(payload.backward.values())
    with pytest.raises(IllegalComposition, match=r"Everywhere.*codec"):
        sl.experts("data", kind=Everywhere, codec="int8")

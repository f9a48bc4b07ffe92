"""A user's own codec: the k largest gradients of every row are sent; what is left out is fed back (arXiv 1809.07599)."""

from dataclasses import dataclass

import pytest
import torch
from helpers.stages import in_halves, linear, plan_of
from helpers.trees import relative_error

import shardlib as sl


@dataclass(frozen=True)
class TopK:
    k: int
    wide, whole = True, False  # it sends float64, and needs no whole leaves

    def bind(self, rows):
        return Sparse(rows, self.k)

    def exchange(self, mesh, axis, items, residuals):
        return Sums([(item.codec, *item.codec.send(mesh, axis, item, residuals.after)) for item in items])


class Sparse:  # for one buffer: a message to a rank is k values and their positions (exact below 2**24)
    def __init__(self, rows, k):
        self.rows, self.row, self.k = rows, rows.row(1), min(k, rows.row(1))
        self.wanted = 1 if rows.scattered else rows.ways  # rows that a rank wants of each other
        self.payload = (rows.ways - 1) * self.wanted * 2 * self.k * rows.dtype.itemsize
        self.keeps = (sl.collectives.codecs.SentResidual(rows.ways * self.row),)

    def pad(self, x):
        return self.rows.pad(x, 1)

    def start(self, device):
        return [torch.zeros(self.rows.ways * self.row, dtype=self.rows.dtype, device=device)]

    def send(self, mesh, axis, item, kept):
        left = (item.buffer + kept[item.kept[0]]).view(-1, self.row)
        positions = left.abs().topk(self.k).indices
        message = torch.stack([left.gather(1, positions), positions.to(left.dtype)], dim=1)
        kept[item.kept[0]] = left.scatter(1, positions, 0).view(-1)
        exchange = sl.collectives.primitives.all_to_all if self.rows.scattered else sl.collectives.primitives.all_gather
        arrived = message.new_empty(self.rows.ways, self.wanted, 2, self.k)
        return arrived, exchange(mesh, axis, arrived.view(-1), message.view(-1))


class Sums(list):
    def wait(self, out=None):
        return [self._sum(*sent) for sent in self]

    def _sum(self, bound, arrived, work):
        work.wait()
        total = arrived.new_zeros(bound.wanted, bound.row)
        for values, positions in zip(*arrived.unbind(2)):
            total.scatter_add_(1, positions.long(), values)
        return bound.rows.unpadded(total[0]) if bound.rows.scattered else total.view(-1)[: bound.rows.elements]


@dataclass(frozen=True)
class Largest(sl.plan.Transform):
    k: int
    name = property(lambda self: f"largest({self.k})")

    def claims(self, sizes, leaves):
        yield sl.plan.Reduce("data", codec=TopK(self.k))

    def check(self, resolved):
        sl.plan.conditions.require_summed(resolved, "data", TopK(self.k))


@pytest.mark.parametrize("k", [25, 1000])
def test_what_is_left_out_arrives_later_on_another_mesh_too(k, tmp_path, pool):
    _, params, batches = linear()
    total = 0.1 * torch.stack(batches).mean(1).sum(0)  # of all steps' updates
    final = {"scale": params["scale"] - total, "shift": params["shift"] - total.flip(0)}
    for half, _, _, found in in_halves(linear, Largest(k), sl.optim.sgd(0.1), tmp_path, pool):
        assert (relative_error(found, final)[0] <= 1e-10) == (half == 1 or k == 1000)
    assert f"in TopK(k={k})" in str(plan_of(linear, Largest(k), sl.optim.sgd(0.1), 2))

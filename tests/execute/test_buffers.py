"""What buffers are to the ranks that share a batch: averaged, rank-local or equal."""

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import RankMismatch, TreeError

X = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # of two ranks


class Recurrent(nn.Module):
    """Truncated back-propagation through time: a memory of this rank's rows, from step to step; and BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.norm = nn.Linear(6, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("memory", torch.zeros(4, 3, dtype=torch.float64))

    def forward(self, x):
        out = torch.tanh(self.cell(torch.cat([self.norm(x), self.memory], 1)))
        self.memory = out.detach()
        return out.square().mean()


def by_hand(steps):
    """Gradients averaged over ranks, each of which has a memory of its own, and statistics averaged after each step."""
    module = Recurrent()
    memories = [module.memory] * 2
    for _ in range(steps):
        before = module.norm.running_var
        total, statistics = 0, []
        for rank in (0, 1):
            module.norm.running_var, module.memory = before.clone(), memories[rank]
            total = total + module(X[rank]) / 2
            memories[rank] = module.memory
            statistics.append(module.norm.running_var)
        with torch.no_grad():
            for parameter, grad in zip(module.parameters(), torch.autograd.grad(total, list(module.parameters()))):
                parameter -= 0.1 * grad
            module.norm.running_var = sum(statistics) / 2
    return memories, module.norm.running_var, module.cell.weight.detach()


@pytest.mark.parametrize("stage", range(4))
def test_a_memory_belongs_to_its_rank(stage):
    def run(mesh, kinds):
        apply, params, buffers = sl.from_module(Recurrent(), buffers=True)
        state, step = sl.make_train_step(
            apply, sl.shard(params, mesh, stage=stage), sl.optim.sgd(0.1), buffers=buffers, buffer_kinds=kinds
        )
        for _ in range(2):
            state, _ = step(state, X[mesh.rank])
        return state.buffers["memory"], state.buffers["norm.running_var"], sl.unshard(state.params)["cell"]["weight"]

    memories, variance, weight = by_hand(2)
    for rank, found in enumerate(sl.simulate(run, {"memory": "rank-local"}, mesh={"data": 2})):
        torch.testing.assert_close(found, (memories[rank], variance, weight), rtol=1e-10, atol=0)
    with pytest.raises(RankMismatch, match=r"(?s)buffers after a step.*memory: rank 0.*buffer_kinds=.*'rank-local'"):
        sl.simulate(run, None, mesh={"data": 2})  # nobody knows which is meant


@pytest.mark.parametrize(
    "kinds, error, match",
    [
        ({"m": "mean"}, ValueError, "none of 'averaged', 'rank-local', 'equal'"),
        ({"*.m": "equal"}, TreeError, r"'\*\.m' matches no buffer; their paths are m, n, seen"),
        ({"*": "averaged"}, TreeError, r"'\*' averages buffer seen, of torch.int64"),
    ],
)
def test_kinds_that_buffers_do_not_have(kinds, error, match):
    buffers = {"m": torch.zeros(2), "n": None, "seen": torch.tensor(0)}

    def run(mesh):
        params = sl.shard({"w": torch.ones(2)}, mesh)
        state, step = sl.make_train_step(
            lambda p, b, x: (p["w"].sum(), b), params, sl.optim.sgd(0.1), buffers=buffers, buffer_kinds=kinds
        )
        step(state, torch.ones(2))

    with pytest.raises(error, match=match):
        sl.simulate(run, mesh={"data": 2})


def test_buffers_that_a_loss_writes_to_are_copies():
    """A step that is skipped leaves the state's as they were."""
    buffers = {"seen": torch.zeros(2)}

    def loss_fn(params, buffers, batch):
        buffers["seen"] += batch
        return (params["w"] * batch / batch.prod()).sum(), buffers

    state, step = sl.make_train_step(
        loss_fn, {"w": torch.ones(2)}, sl.optim.sgd(0.1), buffers=buffers, nonfinite="skip"
    )
    state, _ = step(state, torch.ones(2))
    state, metrics = step(state, torch.zeros(2))
    assert not metrics["finite"] and torch.equal(state.buffers["seen"], torch.ones(2)) and not buffers["seen"].any()

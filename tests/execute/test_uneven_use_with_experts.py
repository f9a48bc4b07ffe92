"""Ranks whose batches use different units beside a layer of experts: they train like one device, and none waits for ever."""

import re

import pytest
import torch
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import RankMismatch

CONFIG = sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"))
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


PARAMS = {
    "heads": [{"w": normal(5, 5)} for _ in range(2)],
    "layer": {
        "router": {"weight": normal(4, 5)},
        "experts": {"gate": normal(4, 6, 5), "up": normal(4, 6, 5), "down": normal(4, 5, 6)},
    },
    "tails": [{"w": normal(5, 5)} for _ in range(2)],
    "last": {"w": normal(5, 5)},
}
X = [normal(6, 5) for _ in range(4)]


def loss_fn(params, batch):
    """The digits of a code are the matrices before the experts, the experts' layer, and the matrices after it; 0 is none."""
    before, layer, after = map(int, f"{int(batch['code']):03d}")
    x = batch["x"]
    if before:
        x = torch.tanh(x @ params["heads"][before - 1]["w"])
    if layer:
        x = x + sl.nn.moe(params["layer"], x, CONFIG)[0]
    if after:
        x = torch.tanh(x @ params["tails"][after - 1]["w"])
    return (x @ params["last"]["w"]).square().mean()


def batches(codes):
    """Step by step the batch of each rank."""
    return [
        [{"x": X[2 * step + rank], "code": torch.tensor(code)} for rank, code in enumerate(of_ranks)]
        for step, of_ranks in enumerate(codes)
    ]


def train(mesh, codes):
    plan = sl.chain(sl.experts(rules="*/experts/*"), sl.zero(3, axis="expert"))
    state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, plan), sl.optim.sgd(0.1))
    losses = []
    for of_ranks in batches(codes):
        state, metrics = step(state, of_ranks[mesh.rank])
        losses.append(metrics["loss"].item())
    return losses, sl.unshard(state.params)


def alone(codes):
    both = lambda params, of_ranks: sum(loss_fn(params, batch) for batch in of_ranks) / 2  # noqa: E731
    state, step = sl.make_train_step(both, PARAMS, sl.optim.sgd(0.1))
    losses = []
    for of_ranks in batches(codes):
        state, metrics = step(state, of_ranks)
        losses.append(metrics["loss"].item())
    return losses, sl.unshard(state.params)


CODES = {
    "others before": [(110, 210), (210, 110)],
    "one has none before": [(110, 10), (10, 110)],
    "others after": [(11, 12), (12, 11)],
    "one has none after": [(11, 10), (10, 11)],
    "before and after": [(110, 12), (211, 10)],
    "later": [(110, 110), (110, 10)],
}


@pytest.mark.parametrize("name", CODES)
def test_ranks_train_like_one_device(name):
    losses, params = alone(CODES[name])
    for found in sl.simulate(train, CODES[name], mesh={"expert": 2}):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert_close(found[1], params, 1e-10)


@pytest.mark.parametrize("name", ["one has none before", "one has none after"])
def test_real_processes(pool, name):
    losses, params = alone(CODES[name])
    for found in pool.run(train, CODES[name], mesh={"expert": 2}):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert_close(found[1], params, 1e-10)


@pytest.mark.timeout(60)
def test_a_layer_of_experts_that_one_rank_leaves_out(pool):
    """Nothing can be made up for it: all ranks raise at once, in processes of their own too."""
    message = "1 of 2 ranks call a layer of experts"
    for good, error in pool.outcomes(train, [(10, 0)], mesh={"expert": 2}):
        assert not good and isinstance(error, RankMismatch) and re.search(message, str(error)), error

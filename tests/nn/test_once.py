"""Decisions of recomputed blocks: a router's choices are made once, in any policy, and taken over by the recomputation."""

import pytest
import torch
from helpers import training
from helpers.trees import assert_same

import shardlib as sl
from shardlib.common.environment import once
from shardlib.nn import routers

CONFIG = sl.nn.MoEConfig(routers.gshard(routers.Capacity(1.0, 1, "random")), jitter=0.3)


class Counting:
    """A router that counts its decisions, and makes each in another way than the one before."""

    def __init__(self):
        self.decisions = 0

    def __call__(self, logits, rng=None, balance=None, mask=None):
        def decide():
            self.decisions += 1
            return [torch.full((len(logits), 1), self.decisions % logits.shape[1])]

        (experts,) = once(decide)
        routing = routers.top_k(1)(logits.scatter(1, experts, 100.0))
        return routing._replace(weights=logits.softmax(1).gather(1, experts))


def params_of(layers=2, experts=4, width=4, hidden=6):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    names = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    return [
        {"router": {"weight": normal(experts, width)}, "experts": {n: normal(experts, *s) for n, s in names.items()}}
        for _ in range(layers)
    ]


def loss_of(config, wrap=sl.block):
    def layer(params, x, rng):
        y, routing = sl.nn.moe(params, x, config, rng)
        return sl.nn.checkpoint_name(x + y, "out"), routing.aux["load"]

    marked = wrap(layer)

    def loss_fn(params, batch, rng):
        x, total = batch["x"], 0.0
        for index, one in enumerate(params):
            x, load = marked(one, x, rng.fold_in(index))
            total = total + 0.01 * load
        return x.square().mean() + total

    return loss_fn


BATCH = {"x": torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)}
POLICIES = {
    "full": sl.remat(),
    "dots": sl.remat("dots"),
    "named": sl.remat(save=["out"]),
}


def trained(loss_fn, *transforms, mesh=None, params=None):
    tx = sl.optim.sgd(0.1)
    return training.simulate(
        mesh or {"data": 1}, loss_fn, params or params_of(), [BATCH] * 2, sl.chain(*transforms), tx, rng=1
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recomputed_block_does_not_route_anew(policy):
    """With jitter, drops and a second expert at random: the losses and parameters are those of no recomputation."""
    kept = trained(loss_of(CONFIG), sl.zero(0))
    found = trained(loss_of(CONFIG), sl.zero(0), POLICIES[policy])
    assert found[0] == kept[0]
    assert_same(found[2], kept[2])


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_made_once(policy):
    """A router that would decide otherwise the second time trains as without recomputation, and is asked as often."""
    results = []
    for transforms in ((), (POLICIES[policy],)):
        router = Counting()
        results.append(trained(loss_of(sl.nn.MoEConfig(router)), sl.zero(0), *transforms))
        assert router.decisions == 4  # two layers, two steps
    assert results[0][0] == results[1][0]
    assert_same(results[0][2], results[1][2])


def test_blocks_within_blocks_decide_once():
    def nested(layer):
        return sl.block(lambda params, x, rng: sl.block(layer)(params, x, rng))

    results = []
    for transforms in ((), (sl.remat(),)):
        router = Counting()
        results.append(trained(loss_of(sl.nn.MoEConfig(router), nested), sl.zero(0), *transforms))
        assert router.decisions == 4
    assert_same(results[0][2], results[1][2])


def test_layers_of_one_block_take_over_their_own_decisions():
    results = []
    for transforms in ((), (sl.remat(),)):
        router = Counting()
        config = sl.nn.MoEConfig(router)

        @sl.block
        def both(params, x, config=config):
            for one in params:
                x = x + sl.nn.moe(one, x, config)[0]
            return x

        results.append(trained(lambda p, batch, rng, f=both: f(p, batch["x"]).square().mean(), sl.zero(0), *transforms))
        assert router.decisions == 4
    assert results[0][0] == results[1][0]
    assert_same(results[0][2], results[1][2])


def test_a_plan_is_made_without_values():
    """The trace of a plan routes nothing, and counts the units and gathers of the step."""
    params, mesh = params_of(), sl.abstract_mesh(data=2)
    for router in (routers.top_k(2), CONFIG.router, routers.expert_choice(1.0)):
        config = sl.nn.MoEConfig(router)
        for chain in (sl.zero(3), sl.chain(sl.zero(3), sl.remat())):
            plan = sl.make_plan(params, mesh, chain, loss_fn=loss_of(config), batch=BATCH, optimizer=sl.optim.sgd(0.1))
            assert plan.traces is not None, str(plan)

"""Trees that share their memory: what one of them gives away, all of them have given away."""

import pytest
import torch

import shardlib as sl
from shardlib.errors import DonatedStateError

PARAMS = {"w": torch.arange(16.0).view(4, 4) / 16}
BATCH = torch.ones(2, 4)


def loss_fn(params, batch):
    return (batch @ params["w"]).square().mean()


def _runs(mesh, transform, donate):
    """Two states of one tree, each with the step of a rate of its own; and the tree."""
    sharded = sl.shard(PARAMS, mesh, transform)
    return sharded, [sl.make_train_step(loss_fn, sharded, sl.optim.sgd(rate), donate=donate) for rate in (0.1, 0.2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transform", [*map(sl.zero, range(4)), sl.chain(sl.zero(1), sl.precision("bf16"))], ids=str)
def test_a_state_whose_sibling_was_donated_says_so(transform, ranks):
    def job(mesh):
        sharded, ((first, step), (second, other)) = _runs(mesh, transform, donate=True)
        first, metrics = step(first, BATCH)
        with pytest.raises(DonatedStateError, match="shard once for each state"):
            other(second, BATCH)
        with pytest.raises(DonatedStateError, match="step 0"):
            sl.unshard(sharded)
        return float(metrics["loss"]), float(step(first, BATCH)[1]["loss"])

    def alone(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, transform), sl.optim.sgd(0.1))
        state, metrics = step(state, BATCH)
        return float(metrics["loss"]), float(step(state, BATCH)[1]["loss"])

    assert sl.simulate(job, mesh={"data": ranks}) == sl.simulate(alone, mesh={"data": ranks})


@pytest.mark.parametrize("stage", range(4))
def test_states_that_are_kept_train_apart(stage):
    def job(mesh):
        _, runs = _runs(mesh, sl.zero(stage), donate=False)
        found = []
        for state, step in runs:
            for _ in range(2):
                state, metrics = step(state, BATCH)
            found.append(float(metrics["loss"]))
        return found

    weights = [PARAMS["w"].clone().requires_grad_() for _ in range(2)]
    wanted = []
    for weight, rate in zip(weights, (0.1, 0.2), strict=True):
        loss_fn({"w": weight}, BATCH).backward()
        wanted.append(float(loss_fn({"w": (weight - rate * weight.grad).detach()}, BATCH)))
    for found in sl.simulate(job, mesh={"data": 2}):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_state_that_is_given_its_own_parameters_goes_on():
    def job(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, sl.zero(2)), sl.optim.sgd(0.1))
        state = sl.replace_params(state, state.params)
        return step(state, BATCH)[0].step

    assert sl.simulate(job, mesh={"data": 2}) == [1, 1]

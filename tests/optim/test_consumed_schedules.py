"""Rates by the tokens that were consumed, and by the size of each step's batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl

LENGTHS = sl.data.discrete_pace([4, 8, 16], [1, 2])
ROWS = sl.data.discrete_pace([2, 6], [2])
PLAN = sl.data.curriculum(ROWS, length=LENGTHS)


def test_a_rate_falls_with_the_tokens():
    """Against a count of the tokens of each batch, also where a schedule is asked for many steps at once."""
    rate = sl.optim.cosine_decay_schedule(0.3, 300)
    of_steps, consumed, wanted = sl.optim.token_schedule(rate, PLAN.tokens), 0, []
    for step in range(12):
        wanted.append(0.3 * (0.5 + 0.5 * math.cos(math.pi * min(1, consumed / 300))))
        assert float(of_steps(step)) == pytest.approx(wanted[-1], rel=1e-12, abs=1e-15)
        consumed += ROWS(step) * LENGTHS(step)
    assert of_steps(torch.arange(12)).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@given(st.integers(1, 64), st.sampled_from(["linear", "sqrt"]), st.floats(1e-4, 1))
def test_a_rate_follows_the_batch_as_deepspeeds(reference, scaling, lr):
    """Its ``scale_lr``: lr·batch/base, or lr·√(batch/base)."""
    rate = sl.optim.batch_schedule(lr, ROWS, reference, scaling=scaling)
    for step in range(5):
        batch = ROWS(step)
        alone = {"linear": sl.optim.linear_scaling, "sqrt": sl.optim.sqrt_scaling}[scaling](lr, batch, reference)
        assert float(rate(step)) == pytest.approx(alone, rel=1e-12)
        wanted = lr * batch / reference if scaling == "linear" else lr * math.sqrt(batch / reference)
        assert float(rate(step)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("stage", range(4))
def test_both_drive_an_optimizer_on_a_mesh(stage):
    """SGD on a loss whose gradient is 1, in the memory of one number: the parameter is minus the sum of the rates."""
    scaled = sl.optim.batch_schedule(sl.optim.linear_schedule(1.0, 0.0, 300), lambda tokens: 4, 1)
    rate = sl.optim.token_schedule(scaled, PLAN.tokens)

    def train(mesh):
        params = sl.shard({"w": torch.zeros(6, dtype=torch.float64)}, mesh, sl.zero(stage))
        state, step = sl.make_train_step(lambda p, batch: p["w"].sum() + 0 * batch.sum(), params, sl.optim.sgd(rate))
        for _ in range(6):
            state, _ = step(state, torch.ones(2))
        return sl.unshard(state.params)["w"]

    wanted = -sum(2 * (1 - PLAN.tokens(step) / 300) for step in range(6))
    for found in sl.simulate(train, mesh={"data": 2}):
        assert torch.allclose(found, torch.full((6,), wanted, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sl.optim.batch_schedule(0.1, ROWS, 4, scaling="cubic"), "scaling='cubic': use 'linear' or 'sqrt'"),
        (lambda: sl.optim.batch_schedule(0.1, ROWS, 0), "reference_batch=0"),
        (lambda: sl.optim.batch_schedule(-0.1, ROWS, 4), r"batch_schedule\(lr=-0.1\)"),
        (lambda: sl.optim.token_schedule("cosine", PLAN.tokens), r"token_schedule\(schedule='cosine'\)"),
    ],
)
def test_wrong_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Spikes of hand-made series, and the size of second moments on every mesh."""

import math

import numpy as np
import pytest
import torch
from helpers.models import mlp, regression_batch, share

import shardlib as sl


@pytest.mark.parametrize(
    "losses, ratios, spikes",
    [
        ([2.0], [1.0], 0),
        ([4.0, 2.0, 3.0, 1.0, 1.2, 1.3], [1, 0.5, 1.5, 0.5, 1.2, 1.3], 2),  # above, not at, 1.2
        ([1.0, math.nan, 1.3, math.inf], [1, math.inf, 1.3, math.inf], 3),
        ([math.nan, 2.0, 2.5], [math.inf, 1, 1.25], 2),  # the first that has a number has none before it
        ([math.inf, math.nan], [math.inf, math.inf], 2),
    ],
)
def test_hand_made_series(losses, ratios, spikes):
    found = sl.report.stability(losses)
    assert found.ratios == pytest.approx(ratios) and found.spikes() == spikes and found.largest == max(ratios)


@pytest.mark.parametrize(
    "form",
    [
        np.array,
        torch.tensor,
        lambda losses: torch.tensor(losses, requires_grad=True),
        lambda losses: [torch.tensor(loss, dtype=torch.bfloat16) for loss in losses],
        iter,
        tuple,
    ],
)
def test_losses_of_every_form(form):
    assert sl.report.stability(form([4.0, 2.0, 3.0])).ratios == (1.0, 0.5, 1.5)


@pytest.mark.parametrize(
    "losses",
    [
        *([], [1.0, 0.0], [1.0, -2.0], -math.inf, [-math.inf], ["a"], [None], "12"),
        *(np.array([]), np.ones((2, 2)), torch.tensor(1.0), 3.0),
    ],
)
def test_losses_without_ratios_are_refused(losses):
    with pytest.raises(ValueError, match="numbers above 0"):
        sl.report.stability(losses)


SLICED = sl.tensor_slicing({"layers/0/*": "column", "layers/1/weight": "row"}, axis="model")
FROZEN = sl.freeze("layers/0/*")


@pytest.mark.parametrize(
    "transform, mesh",
    [
        (sl.zero(0), {"data": 1}),
        (sl.zero(0), {"data": 2}),
        (sl.zero(1), {"data": 3}),
        (sl.chain(sl.zero(3), SLICED), {"data": 2, "model": 2}),
        *((sl.chain(sl.zero(stage), FROZEN), {"data": 2}) for stage in (0, 1, 3)),
    ],
)
def test_every_trained_element_counts_once(transform, mesh):
    """Against g² of one device's gradient, of the leaves that are trained, after one step: v = (1 − b2)·g²."""
    loss_fn, params = mlp([6, 4, 3])
    batch = regression_batch(12, 6, 3)
    _, grads = sl.value_and_grad(loss_fn)(params, batch)
    frozen = FROZEN in getattr(transform, "transforms", ())
    leaves = [grad.abs() for layer in grads["layers"][frozen:] for grad in layer.values()]

    def train(mesh):
        sharded = sl.shard(params, mesh, transform)
        optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1e9), sl.optim.adamw(1e-3))
        state, step = sl.make_train_step(loss_fn, sharded, optimizer)
        state, _ = step(state, share(batch, mesh.coords["data"], mesh.shape["data"]))
        return sl.report.second_moments(state)

    for found in sl.simulate(train, mesh=mesh):
        scale = 0.001**0.5
        assert found.norm == pytest.approx(scale * sum(float(leaf.sum()) for leaf in leaves), rel=1e-9)
        assert found.largest == pytest.approx(scale * max(float(leaf.max()) for leaf in leaves), rel=1e-9)


def test_what_is_no_state_is_refused():
    for other in ({"params": {}}, None):
        with pytest.raises(TypeError, match=r"takes the TrainState of sl\.make_train_step, on every rank, not "):
            sl.report.second_moments(other)


def test_states_without_second_moments_are_refused():
    for optimizer in (sl.optim.sgd(0.1), sl.optim.adamw8bit(0.1)):
        state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(8192)}, optimizer)
        with pytest.raises(ValueError, match="0 running means"):
            sl.report.second_moments(state)

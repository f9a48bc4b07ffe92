"""Residuals of compressed exchanges restored to another plan: none is lost, and none is added twice."""

import logging
from dataclasses import replace

import pytest
import torch
from helpers.models import TINY, mlp, regression_batch, share, tiny_gpt, token_batches

import shardlib as sl
from shardlib import checkpoint
from shardlib.checkpoint.residuals import residual_fragments
from shardlib.execute.batches import batch_index
from shardlib.models import gpt

NODES = {"node": 2, "local": 2}
INSIDE = sl.zero(1, axis="local", replicate="node")
BOTH = sl.chain(sl.onebit(axis="node"), sl.onebit(axis="local"))


def owner():
    return sl.optim.onebit_adam(1e-2, 1, axis="node")


def adam():
    return sl.optim.adamw(1e-2)


def corrections(state):
    """(kind, path) -> what this rank's errors still have to give."""
    found = {}
    for fragment in residual_fragments(state):
        _, kind, what, holder, path = fragment.name.split("/", 4)
        whole = found.setdefault((kind, path), torch.zeros(200, dtype=torch.float64))
        weight = int(holder.split()[-1]) if kind == "mean" and what.endswith("sent") else 1
        whole[fragment.start : fragment.stop] += fragment.data / weight
    return found


def summed(ranks):
    total = {}
    for found in ranks:
        for key, whole in found.items():
            total[key] = total.get(key, 0) + whole
    return total


def saved_and_restored(folder, model, before, after):
    """All ranks' corrections in the state that was saved, and in that which it was restored to."""
    fit, params, batch = model

    def fresh(mesh, transform, make):
        return sl.make_train_step(fit, sl.shard(params, mesh, transform), make())

    def save(mesh, transform, make):
        state, step = fresh(mesh, transform, make)
        plan = state.params.plan
        for _ in range(4):
            state, _ = step(state, share(batch, batch_index(plan, mesh), plan.batch_ranks))
        checkpoint.save(folder, state)
        return corrections(state)

    def load(mesh, transform, make):
        return corrections(checkpoint.restore(checkpoint.latest(folder), fresh(mesh, transform, make)[0]))

    (first, *how), (second, *other) = before, after
    return summed(sl.simulate(save, *how, mesh=first)), summed(sl.simulate(load, *other, mesh=second))


def assert_kept(recorded):
    wanted, got = recorded
    assert wanted and wanted.keys() == got.keys()
    for key, whole in wanted.items():
        assert whole.any()
        torch.testing.assert_close(got[key], whole, rtol=1e-12, atol=1e-15, msg=lambda text, key=key: f"{key}: {text}")


PLANS = {
    "one exchange instead of two": (
        ({"data": 2}, sl.chain(sl.zero(0), sl.onebit()), adam),
        ({"data": 2}, sl.chain(sl.zero(2), sl.onebit()), adam),
    ),
    "two instead of one": (
        ({"data": 2}, sl.chain(sl.zero(3), sl.onebit()), adam),
        ({"data": 2}, sl.chain(sl.zero(0), sl.onebit(scales=16)), adam),
    ),
    "one axis of two": ((NODES, sl.chain(INSIDE, BOTH), adam), (NODES, sl.chain(INSIDE, sl.onebit(axis="node")), adam)),
    "the other axis": (
        (NODES, sl.chain(INSIDE, sl.onebit(axis="node")), adam),
        (NODES, sl.chain(INSIDE, sl.onebit(axis="local")), adam),
    ),
    "the first one forgets": (
        (NODES, sl.chain(INSIDE, sl.onebit(axis="node")), adam),
        ({"node": 3, "local": 2}, sl.chain(INSIDE, sl.onebit("local", feedback=False), sl.onebit("node")), adam),
    ),
    "another order of axes": (
        (NODES, sl.chain(sl.zero(2, axis="node"), sl.zero(1, axis="local"), BOTH), adam),
        ({"local": 3, "node": 2}, sl.chain(sl.zero(1, axis="node"), sl.zero(2, axis="local"), BOTH), adam),
    ),
    "gradients and an optimizer's": (
        (NODES, sl.chain(INSIDE, sl.onebit(axis="local")), owner),
        ({"node": 3, "local": 2}, sl.chain(INSIDE, sl.onebit(axis="local")), owner),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_another_plan_resumes_with_the_same_residuals(tmp_path, name):
    loss_fn, params = mlp([6, 9, 5])
    model = loss_fn, params, regression_batch(24, 6, 5)
    assert_kept(saved_and_restored(tmp_path, model, *PLANS[name]))


def test_the_residual_of_one_element_among_others_is_saved(tmp_path):
    """That of a scalar in a buffer of several rows has the stride of a row."""
    params = {"scale": torch.ones((), dtype=torch.float64), "w": torch.full((3,), 0.5, dtype=torch.float64)}

    def fit(params, batch):
        return (params["scale"] * params["w"] * batch["x"]).square().mean()

    model = fit, params, {"x": torch.linspace(-1, 2, 18, dtype=torch.float64).view(6, 3)}
    coded = sl.chain(sl.zero(2), sl.onebit(scales=128))
    assert_kept(saved_and_restored(tmp_path, model, ({"data": 2}, coded, adam), ({"data": 3}, coded, adam)))


@pytest.mark.parametrize("stages", [(1, 1), (0, 2)])
@pytest.mark.parametrize("pipes", [(4, 4), (2, 4), (4, 1)])
def test_through_stages_a_tied_leaf_is_corrected_once(tmp_path, stages, pipes):
    """Its two homes have errors each, and stages between have none."""
    _, params = tiny_gpt(torch.float64, layers=4, tie=True, width=4)
    fit = gpt.make_sequential(replace(TINY, layers=4, tie=True, dtype=torch.float64, width=4))
    model = fit, gpt.to_blocks(params), token_batches(1, rows=12)[0]

    def plan(stage, pipe, ranks):
        return {"data": ranks, "pipe": pipe}, sl.chain(sl.zero(stage), sl.pipeline("1f1b", 2), sl.onebit()), adam

    assert_kept(saved_and_restored(tmp_path, model, plan(stages[0], pipes[0], 2), plan(stages[1], pipes[1], 3)))


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp16")])
def test_residuals_are_the_same_with_and_without_a_loss_scale(tmp_path, before, after):
    """Errors are of scaled gradients; and whether losses are scaled is the new plan's to say."""
    fit, params = mlp([6, 9, 5])
    batch = regression_batch(8, 6, 5)

    def fresh(mesh, precision):
        transform = sl.chain(sl.zero(0), sl.onebit(), sl.precision(precision))
        return sl.make_train_step(fit, sl.shard(params, mesh, transform), adam())

    def recorded(state):
        scale = state.scale.value if state.scale else 1
        return scale, {path: error / scale for (_, path), error in corrections(state).items()}

    def save(mesh):
        state, step = fresh(mesh, before)
        for _ in range(3):
            state, _ = step(state, share(batch, mesh.rank, 2))
        checkpoint.save(tmp_path, state)
        return recorded(state)

    def load(mesh):
        return recorded(checkpoint.restore(checkpoint.latest(tmp_path), fresh(mesh, after)[0]))

    for (_, wanted), (scale, got) in zip(*(sl.simulate(run, mesh={"data": 2}) for run in (save, load))):
        assert scale == (2.0**16 if after == "fp16" else 1)
        assert any(error.any() for error in wanted.values())
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("after", [sl.zero(0), sl.chain(sl.zero(0), sl.onebit(feedback=False))])
def test_dropped_residuals_are_logged(tmp_path, after, caplog):
    loss_fn, params = mlp([6, 9, 5])
    before = {"data": 2}, sl.chain(sl.zero(0), sl.onebit()), adam
    with caplog.at_level(logging.WARNING, "shardlib.checkpoint"):
        saved_and_restored(tmp_path, (loss_fn, params, regression_batch(8, 6, 5)), before, ({"data": 2}, after, adam))
    assert (
        "compressed exchanges of gradients are dropped: this plan has no such exchange with error feedback"
        in caplog.text
    )

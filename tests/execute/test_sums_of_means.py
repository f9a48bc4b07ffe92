"""Sums of means with different weights: each is divided by its own, over all ranks and micro-batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import LossError
from shardlib.plan.loss_scale import LossScale
from shardlib.tree import tree_map

torch.manual_seed(0)
PARAMS = [
    {"w": torch.randn(5, 6).double()},
    {"words": torch.randn(3, 5).double(), "pairs": torch.randn(2, 5).double()},
]
ROWS = torch.randn(16, 6).double(), torch.randint(3, (16,)), torch.randint(2, (16,)), torch.rand(16).double()
STEPS = 4


def batch_of(step):
    """Other weights in each step but the last, and no word at all in one."""
    masked = (torch.rand(16, generator=torch.Generator().manual_seed(min(step, 2))) < 0.4).double()
    return (*ROWS, masked * (step != 1))


def hidden(p, x, batch):
    return torch.tanh(F.linear(batch[0], p["w"])), p["w"].square().sum()


def losses(p, x, batch):
    _, words, pairs, shares, masked = batch
    of_word = F.cross_entropy(F.linear(x[0], p["words"]), words, reduction="none")
    of_pair = F.cross_entropy(F.linear(x[0], p["pairs"]), pairs, reduction="none")
    return sl.Mean((of_word * masked).sum(), masked.sum()), sl.Mean((of_pair * shares).sum(), shares.sum())


def total(p, x, batch):
    words, pairs = losses(p, x, batch)
    return words - 0.5 * pairs + 0.01 * x[1], {"both": words + pairs}


def loss_fn(params, batch):
    return total(params[1], hidden(params[0], None, batch), batch)


PIPED = sl.sequential([hidden, total])


def trained(mesh, transform, loss=loss_fn, dtype=torch.float64, **options):
    params = sl.shard(tree_map(lambda leaf: leaf.to(dtype), PARAMS), mesh, transform)
    state, step = sl.make_train_step(loss, params, sl.optim.sgd(0.5), **options)
    ranks, rank = params.plan.batch_ranks, 0
    for axis in params.plan.batch_axes:
        rank = rank * mesh.shape[axis] + mesh.coords[axis]
    found = []
    for number in range(STEPS):
        whole = (leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in batch_of(number))
        state, metrics = step(state, tuple(leaf.chunk(ranks)[rank] for leaf in whole))
        found.append(metrics["loss"].double())
    return {"params": sl.unshard(state.params), "losses": found, "aux": metrics["aux"]["both"]}


def one_device():
    """Plain PyTorch."""
    params = [{path: leaf.clone().requires_grad_() for path, leaf in tree.items()} for tree in PARAMS]
    leaves = [leaf for tree in params for leaf in tree.values()]
    found = []
    for step in range(STEPS):
        batch = batch_of(step)
        x = hidden(params[0], None, batch)
        (words, some), (pairs, others) = losses(params[1], x, batch)
        loss = (words / some if some else 0) - 0.5 * pairs / others + 0.01 * x[1]
        found.append(loss.detach())
        with torch.no_grad():
            for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True)):
                leaf -= 0 if grad is None else 0.5 * grad
    both = (words / some + pairs / others).detach()
    return {"params": [{p: leaf.detach() for p, leaf in t.items()} for t in params], "losses": found, "aux": both}


DUE = one_device()


def test_arithmetic():
    one, other = sl.Mean(torch.tensor(6.0), 3), sl.Mean(torch.tensor(4.0), 2)

    def value(mean):
        return sum(float(term.total) / float(term.weight) for term in getattr(mean, "terms", (mean,)))

    for mean, due in (
        (one + other, 4),
        (sum([one, other, one]), 6),
        (one - other / 4, 1.5),
        (-(one + other) + 10, 6),
        (np.float64(2) * one + torch.tensor(1.0), 5),
        (torch.tensor(2.0) * (one - 1), 2),
        (1 - one, -1),
    ):
        assert value(mean) == due
    assert 0 + one is one and isinstance(2 * one, sl.Mean)
    for wrong in (lambda: one * other, lambda: one - "x", lambda: one * torch.ones(2), lambda: "x" + one):
        with pytest.raises(TypeError, match="Mean with"):
            wrong()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage(stage):
    for shape, transform, loss in (
        ({"data": 4}, sl.zero(stage), loss_fn),
        ({"other": 2, "data": 2}, sl.zero(stage, replicate="other"), loss_fn),
        ({"data": 2}, sl.chain(sl.zero(stage), sl.accumulate(4)), loss_fn),
        ({"data": 2, "pipe": 2}, sl.chain(sl.zero(stage), sl.pipeline(microbatches=4)), PIPED),
    ):
        for result in sl.simulate(trained, transform, loss, mesh=shape):
            assert_close(result, DUE, 1e-10)


@pytest.mark.parametrize("transform", [sl.zero(1), sl.chain(sl.zero(3), sl.accumulate(4), sl.remat())], ids=str)
def test_in_graphs(transform, caplog):
    """Ranks sum the weights between the graph of forward and that of backward."""
    found = sl.simulate(trained, transform, mesh={"data": 2})
    compiled = sl.simulate(lambda mesh: trained(mesh, transform, compile=True), mesh={"data": 2})
    assert "cannot be traced" not in caplog.text
    for one, other in zip(found, compiled, strict=True):
        assert_same(other, one)


def test_other_precisions_and_sums():
    assert_close(trained(sl.make_mesh(), sl.accumulate(2)), DUE, 1e-10)
    reproducible = sl.chain(sl.zero(2), sl.reproducible(8))
    first, *others = [sl.simulate(trained, reproducible, mesh={"data": ranks})[0] for ranks in (1, 2, 8)]
    assert_close(first, DUE, 1e-10)
    for other in others:
        assert_same(other, first)
    scaled = sl.chain(sl.zero(1), sl.accumulate(2), sl.precision("fp16", loss_scale=LossScale(2.0**10)))
    half = sl.simulate(trained, scaled, loss_fn, torch.float32, mesh={"data": 2})[0]
    for path in ("losses", "aux"):
        assert_close(half[path], DUE[path], 1e-2)


def test_gradients_and_evaluation():
    def found(mesh):
        params = sl.shard(PARAMS, mesh, sl.zero(3))
        batch = tuple(leaf.chunk(2)[mesh.rank] for leaf in batch_of(0))
        (loss, _), grads = sl.value_and_grad(loss_fn)(params, batch)
        evaluate = sl.make_eval_step(lambda params, batch: loss_fn(params, batch)[0], params)
        halves = [tuple(leaf[part] for leaf in batch) for part in (slice(0, 2), slice(2, 8))]
        return {"loss": [loss, evaluate(params, batch), evaluate.over(params, halves)], "grads": sl.unshard(grads)}

    params = [{path: leaf.clone().requires_grad_() for path, leaf in tree.items()} for tree in PARAMS]
    ((one, two, three),), _ = loss_fn(params, batch_of(0))
    loss = one.total / one.weight + two.total / two.weight + three.total
    flat = iter(torch.autograd.grad(loss, [leaf for tree in params for leaf in tree.values()]))
    grads = [{path: next(flat) for path in tree} for tree in params]
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=2), sl.zero(3), loss_fn=loss_fn, batch=batch_of(0))
    assert "Gathers per micro-batch: 4 (as traced)" in str(plan)
    for result in sl.simulate(found, mesh={"data": 2}):
        assert_close(result, {"loss": [loss.detach()] * 3, "grads": grads}, 1e-10)


def test_what_is_not_right_is_refused():
    def of_some(params, batch):
        words, pairs = losses(params[1], hidden(params[0], None, batch), batch)
        return words + pairs if len(batch[0]) > 4 else words

    def uneven(mesh, transform):
        _, step = made = sl.make_train_step(of_some, sl.shard(PARAMS, mesh, transform), sl.optim.sgd(0.1))
        return step(made[0], tuple(leaf[: 8 - 4 * mesh.rank] for leaf in batch_of(0)))

    with pytest.raises(LossError, match=r"differ in form.*\n.*a sum of 2 sl.Mean as the loss"):
        sl.simulate(uneven, sl.zero(1), mesh={"data": 2})

    calls = iter(range(1, 100))

    def counting(params, batch):
        words, pairs = losses(params[1], hidden(params[0], None, batch), batch)
        return words + sl.Mean(pairs.total, next(calls))

    def without_weight(params, batch):
        return sum(sl.Mean(mean.total, 0) for mean in loss_fn(params, batch)[0].terms[:2])

    with pytest.raises(LossError, match="changed when the loss ran again"):
        state, step = sl.make_train_step(counting, PARAMS, sl.optim.sgd(0.1))
        step(state, batch_of(0))
    with pytest.raises(LossError, match="are 0 on all ranks"):
        state, step = sl.make_train_step(without_weight, PARAMS, sl.optim.sgd(0.1))
        step(state, batch_of(0))
    with pytest.raises(LossError, match=r"a sum of 3 .*each by itself"):
        sl.debug.check(({"data": 2}, sl.zero(1)), lambda p, b: loss_fn(p, b)[0], batch_of(0), params=PARAMS)

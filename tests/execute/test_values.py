"""The step as a function of values gives what the executor gives: the same losses, weights and gradients."""

import re

import pytest
import torch
from helpers.models import TINY, mlp, mlp_loss, regression_batch, share, tiny_gpt, token_batches
from helpers.strategies import MESHES, chains, models
from helpers.trees import assert_close, relative_error
from hypothesis import given, note, settings
from hypothesis import strategies as st
from optree import tree_map

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.execute.batches import batch_index
from shardlib.execute.stages.runner import runner_of
from shardlib.execute.step import LossStep
from shardlib.execute.values.runner import ValueStage
from shardlib.models import gpt
from shardlib.tree import leaves_of

TOLERANCE = 1e-12


def evaluate(mesh, loss_fn, params, batch, transform, run_by, rng=None, buffers=None):
    """Loss, weight, gradients by bucket, aux, norm and buffers of one step, by a runner."""
    sharded = sl.shard(params, mesh, transform)
    plan = sharded.plan
    step = LossStep(loss_fn, plan, mesh, buffers is not None, run_by=run_by)
    mine = share(batch, batch_index(plan, mesh), plan.batch_ranks)
    found = step(sharded, mine, buffers, rng, comm={}, equal={})
    return found.loss, found.weight, dict(found.grads), found.aux, found.norm, found.buffers


def both(mesh_shape, *args, **kwargs):
    """What each rank gets by the executor and as a function of values."""

    def run(mesh):
        return [evaluate(mesh, *args, run_by=run_by, **kwargs) for run_by in (runner_of, ValueStage)]

    return sl.simulate(run, mesh=mesh_shape)


def check(pairs, tolerance=TOLERANCE):
    for (loss, weight, grads, *rest), (loss_too, weight_too, grads_too, *rest_too) in pairs:
        assert loss_too.item() == pytest.approx(loss.item(), rel=tolerance) and weight == weight_too
        error, path = relative_error(grads_too, grads)
        assert error <= tolerance, f"{path}: {error}"
        assert relative_error(rest_too, rest)[0] <= tolerance


@settings(max_examples=max(20, settings().max_examples // 3))
@given(st.data())
def test_drawn_chains(data):
    mesh = data.draw(MESHES)
    transforms, microbatches, _ = data.draw(chains(mesh))
    model = data.draw(models())
    rows = torch.Size(mesh.values()).numel() * microbatches
    batch = torch.randn(rows, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    note(f"{mesh} {transforms}")
    check(both(mesh, model.loss_fn, model.params, batch, sl.chain(*transforms)))


CHAINS = {
    "0": (sl.zero(0), 0),
    "1": (sl.zero(1), 0),
    "2 in 3 micro-batches": (sl.chain(sl.zero(2), sl.accumulate(3)), 0),
    "3": (sl.zero(3), 0),
    "3 in 2 micro-batches, recomputed": (sl.chain(sl.zero(3), sl.accumulate(2), sl.remat()), 0),
    "3, dots kept": (sl.chain(sl.zero(3), sl.remat("dots")), 0),
    "bf16": (sl.chain(sl.zero(3), sl.precision("bf16")), 0),
    "bf16 without masters": (sl.chain(sl.zero(2), sl.precision("bf16", master=False)), 0),
    "autocast": (sl.chain(sl.zero(3), sl.precision("bf16", autocast=True)), 0),
    "frozen": (sl.chain(sl.zero(3), sl.freeze("blocks/0/*")), 0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_gpt(name):
    transform, tolerance = CHAINS[name]
    loss_fn, params = tiny_gpt(dropout=0.1)
    check(both({"data": 2}, loss_fn, params, token_batches(1, 12)[0], transform, rng=sl.Key(3)), tolerance)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_slices(stage):
    loss_fn, params = tiny_gpt()
    transform = sl.chain(sl.zero(stage), sl.tensor_slicing(gpt.slicing_rules(TINY)), sl.accumulate(2))
    check(both({"data": 2, "model": 2}, loss_fn, params, token_batches(1, 8)[0], transform), 0)


def several(params, buffers, batch):
    """A sum of means, with aux, and buffers that change."""
    x, y = batch
    error = (x @ params["w"] - y).square().sum(1)
    counted = (x[:, 0] > 0).double()
    loss = sl.Mean((error * counted).sum(), counted.sum()) + 0.1 * sl.Mean(params["w"].square().sum(), 1)
    return (loss, {"error": sl.Mean(error.sum(), len(x)), "w": params["w"]}), {
        "running_mean": buffers["running_mean"] + x.mean(0)
    }


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sums_of_means_aux_and_buffers(microbatches):
    params, buffers = (
        {"w": torch.randn(6, 4, dtype=torch.float64)},
        {"running_mean": torch.zeros(6, dtype=torch.float64)},
    )
    batch, transform = regression_batch(8, 6, 4), sl.chain(sl.zero(3), sl.accumulate(microbatches))
    check(both({"data": 2}, several, params, batch, transform, buffers=buffers), 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_torch_differentiates_inside_a_loss(stage):
    """Per-sample gradients and a Hessian-vector product of parameters that are gathered for the loss."""
    _, params = mlp([6, 5, 4])

    def loss_fn(params, batch):
        def each(params, x, y):
            return mlp_loss(params, (x[None], y[None]))

        samples = torch.func.vmap(torch.func.grad(each), (None, 0, 0))(params, *batch)
        slope = lambda params: torch.func.grad(mlp_loss)(params, batch)  # noqa: E731
        curved = torch.func.jvp(slope, (params,), (tree_map(torch.cos, params),))[1]
        parts = [sample.square().sum() for sample in leaves_of(samples)]
        return sum(parts) + sum(leaf.sum() for leaf in leaves_of(curved))

    batch = regression_batch(8, 6, 4)
    wanted = [torch.func.grad_and_value(loss_fn)(params, share(batch, rank, 2)) for rank in range(2)]

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        step = LossStep(loss_fn, sharded.plan, mesh, False, run_by=ValueStage)
        found = step(sharded, share(batch, mesh.rank, 2), None, None, comm={}, equal={})
        grads = sl.Sharded(sharded.plan, mesh, "grad", found.grads)
        return found.loss, sl.unshard(grads)

    for loss, grads in sl.simulate(run, mesh={"data": 2}):
        assert loss.item() == pytest.approx(sum(loss.item() for _, loss in wanted) / 2, rel=TOLERANCE)
        assert_close(grads, tree_map(lambda a, b: (a + b) / 2, wanted[0][0], wanted[1][0]), TOLERANCE)


REFUSED = {
    "pipeline": sl.pipeline(microbatches=2),
    "reproducible": sl.reproducible(4),
    "onebit": sl.onebit(),
    "offload": sl.offload(),
    "remat(blocks=)": sl.remat(blocks=1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_values_do_not_have(name):
    axis = "pipe" if name == "pipeline" else "data"
    blocks = [lambda p, carry, batch: batch @ p, lambda p, carry, batch: (carry @ p).square().mean()]

    def run(mesh):
        transform = REFUSED[name] if name == "pipeline" else sl.chain(sl.zero(2), REFUSED[name])
        plan = sl.shard([torch.ones(4, 4), torch.ones(4, 4)], mesh, transform).plan
        with pytest.raises(IllegalComposition, match=f"(?s)does not go together with.*{re.escape(name)}.*: .*Or take"):
            ValueStage(sl.sequential(blocks), plan, mesh)

    sl.simulate(run, mesh={axis: 2})

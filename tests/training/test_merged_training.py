"""Training with small units merged: as without, on real processes; the bytes that a plan tells; checkpoints."""

import pytest
import torch
from helpers import training
from helpers.merging import merging
from helpers.models import mlp, regression_batch
from helpers.trees import assert_close, assert_same

import shardlib as sl

SIZES = [4, 8, 8, 8, 8, 8, 4]  # layers of 320 to 576 bytes in float64
PAIRS = 1200
CHAINS = {
    "stage 0": sl.zero(0),
    "stage 2, micro-batches": sl.chain(sl.zero(2), sl.accumulate(2)),
    "stage 3": sl.zero(3),
    "stage 3, recomputed": sl.chain(sl.zero(3), sl.remat()),
    "stage 3, states on the host": sl.chain(sl.zero(3), sl.offload()),
}


def model():
    loss_fn, params = mlp(SIZES, torch.float64)
    return loss_fn, params, [regression_batch(8, 4, 4, torch.float64) for _ in range(4)]


def merged_train(mesh, most, transform):
    loss_fn, params, batches = model()
    with merging(most):
        plan = sl.make_plan(params, mesh, transform)
        return plan.units, training.train(mesh, loss_fn, params, batches, transform, training.optimizer(1.0))


@pytest.mark.parametrize("name", ["stage 3", "stage 3, recomputed", "stage 2, micro-batches"])
def test_real_processes_train_as_without(pool, name):
    def run(most):
        return pool.run(merged_train, most, CHAINS[name], mesh={"data": 2})

    for (units, (losses, norms, final)), (one, wanted) in zip(run(PAIRS), run(0), strict=True):
        assert units == ("layers/0…1", "layers/2…3", "layers/4…5") and len(one) == 6
        assert losses == pytest.approx(wanted[0], rel=1e-10)
        assert norms == pytest.approx(wanted[1], rel=1e-10)
        assert_close(final, wanted[2], 1e-10)


@pytest.mark.parametrize("most", [PAIRS, 1 << 20])
@pytest.mark.parametrize("name", CHAINS)
def test_simulated_ranks_train_as_without(name, most):
    loss_fn, params, batches = model()

    def run(most):
        with merging(most):
            return training.simulate({"data": 2}, loss_fn, params, batches, CHAINS[name], training.optimizer(1.0))

    got, wanted = run(most), run(0)
    assert got[0] == pytest.approx(wanted[0], rel=1e-10)
    assert_close(got[2], wanted[2], 1e-10)


@pytest.mark.parametrize(("first", "then"), [(0, PAIRS), (PAIRS, 0), (PAIRS, 1 << 20)])
def test_checkpoints_are_restored_into_other_units_and_on_other_meshes(tmp_path, first, then):
    """Elements of a state go by the paths of leaves."""
    loss_fn, params, batches = model()

    def made(mesh, stage):
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.zero(stage)), training.optimizer(1.0))

    def trained(state, step):
        for batch in batches[:2]:
            state, _ = step(state, batch)
        return state

    def save(mesh):
        state, step = made(mesh, 3)
        state = trained(state, step)
        folder, whole = sl.checkpoint.save(tmp_path, state), sl.unshard(state.params)
        return folder, whole, sl.unshard(trained(state, step).params)

    def load(mesh):
        state, step = made(mesh, 2)
        state = sl.checkpoint.restore(folder, state)
        return sl.unshard(state.params), sl.unshard(trained(state, step).params)

    with merging(first):
        folder, saved, went_on = sl.simulate(save, mesh={"data": 2})[0]
    with merging(then):
        loaded = sl.simulate(load, mesh={"data": 3})
    for restored, continued in loaded:
        assert_same(restored, saved)
        assert_close(continued, went_on, 1e-10)

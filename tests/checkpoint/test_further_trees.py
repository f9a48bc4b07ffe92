"""Trees beside the state, such as averages of parameters, are saved and restored with it, on any mesh."""

import pytest
import torch
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import TreeError

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(12, 5, 3)
AVERAGE = sl.optim.ema(0.9)


def start(mesh, stage, precision=None):
    transform = sl.zero(stage) if precision is None else sl.chain(sl.zero(stage), sl.precision(precision))
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, transform), sl.optim.adamw(0.1))
    return state, step, {"average": AVERAGE.init(state.params), "best": torch.zeros(())}


def steps(mesh, state, step, also, number):
    for _ in range(number):
        state, metrics = step(state, share(BATCH, mesh.rank, mesh.size))
        averaged, also["average"] = AVERAGE.update(state.params, also["average"])
        also["best"] = metrics["loss"].double().detach().clone()
    return state, averaged


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("mesh", "stage"), [({"data": 3}, 3), ({"data": 2}, 1), ({"data": 1}, 0)])
def test_an_average_goes_on_on_another_mesh(tmp_path, mesh, stage, precision):
    def run(mesh):
        state, step, also = start(mesh, 2, precision)
        state, _ = steps(mesh, state, step, also, 3)
        with sl.checkpoint.Manager(tmp_path) as manager:
            manager.save(state, also=also)
        _, averaged = steps(mesh, state, step, also, 2)
        return sl.unshard(averaged)

    def resumed(mesh):
        state, step, also = start(mesh, stage, precision)
        also["best"] = torch.zeros((), dtype=torch.float64)
        state = sl.checkpoint.restore(tmp_path, state, also=also)
        assert also["average"].count == 3 and also["best"] > 0
        _, averaged = steps(mesh, state, step, also, 2)
        return sl.unshard(averaged)

    wanted, found = sl.simulate(run, mesh={"data": 2})[0], sl.simulate(resumed, mesh=mesh)[0]
    if mesh == {"data": 2}:
        assert_same(found, wanted)
    for one, other in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if precision is None else 2e-2, atol=1e-9)


@pytest.mark.parametrize("view", [lambda x: x[::2], lambda x: x.view(2, 3).T], ids=["every second", "transposed"])
def test_a_view_with_strides_comes_back(tmp_path, view):
    state, _, _ = start(sl.make_mesh(), 0)
    sl.checkpoint.save(tmp_path, state, also={"it": view(torch.arange(6.0))})
    found = torch.full((6,), -1.0)
    sl.checkpoint.restore(tmp_path, state, also={"it": view(found)})
    assert torch.equal(view(found), view(torch.arange(6.0))) and found[1] in (-1, 1)


def test_trees_that_are_not_asked_for_are_named(tmp_path):
    state, _, also = start(sl.make_mesh(), 0)
    sl.checkpoint.save(tmp_path, state, also=also)
    with pytest.raises(
        TreeError, match=r"(?s)also/average/count: in the checkpoint, not in the state.*name further trees in also="
    ):
        sl.checkpoint.restore(tmp_path, state)
    assert sl.checkpoint.restore(tmp_path, state, partial=["also/*"]).step == 0


@pytest.mark.parametrize("wrong", ["a number", "averaged parameters"])
def test_what_is_no_tensor_is_refused(tmp_path, wrong):
    state, _, _ = start(sl.make_mesh(), 0)
    also = {"it": 3 if wrong == "a number" else state.params}
    with pytest.raises(TreeError, match=r"also: these are no tensors:\n  - it: (int|Sharded)"):
        sl.checkpoint.save(tmp_path, state, also=also)


def test_one_tensor_under_two_names_is_refused(tmp_path):
    def run(mesh):
        state, *_ = start(mesh, 1)
        sl.checkpoint.save(tmp_path, state, also={"best": torch.ones(()), "last": torch.zeros(())})
        one = torch.full((), 5.0)
        with pytest.raises(TreeError, match="best and last"):
            sl.checkpoint.restore(tmp_path, state, also={"best": one, "last": one})
        return float(one)

    assert sl.simulate(run, mesh={"data": 1}) == [5.0]


def test_buffers_come_back_in_memory_of_their_own(tmp_path):
    """Fresh ones that are one tensor, those that are views of a batch, and one number for many."""

    def fit(params, buffers, batch):
        moved = {"mean": buffers["mean"] + batch.mean(), "square": buffers["square"] + batch.square().mean()}
        return (params["w"] * batch).sum(), {**moved, "last": batch, "spread": batch.mean().expand(2)}

    def run(mesh, goes_on):
        zero, batch = torch.zeros(()), torch.tensor([1.0, 3.0])
        buffers = {"mean": zero, "square": zero, "last": torch.zeros(2), "spread": torch.zeros(1).expand(2)}
        params = sl.shard({"w": torch.ones(2)}, mesh, stage=1)
        state, step = sl.make_train_step(fit, params, sl.optim.sgd(0.1), buffers=buffers)
        if not goes_on:
            state, _ = step(state, batch)
            sl.checkpoint.save(tmp_path, state)
            state, _ = step(state, other := torch.tensor([2.0, 2.0]))
        restored = sl.checkpoint.restore(tmp_path, state).buffers
        assert zero == 0 and (goes_on or other.tolist() == [2.0, 2.0])
        return {name: leaf.tolist() for name, leaf in restored.items()}

    wanted = {"last": [1.0, 3.0], "mean": 2.0, "spread": [2.0, 2.0], "square": 5.0}
    for goes_on in (False, True):
        assert sl.simulate(run, goes_on, mesh={"data": 1}) == [wanted]

"""Parameters on disk that one rank cannot read in forward or backward: an error of all ranks, none of which waits."""

from functools import partial

import pytest
import torch
from helpers.faults import BROKEN, Faults
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import RankFailure, StorageError

FOLDER = "parameters"

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def layer(params, x):
    return torch.tanh(x @ params["w"])


def last(params, x):
    return layer(params, x).square().mean()


FN = sl.sequential(
    [lambda p, carry, x: layer(p, x), *[lambda p, carry, x: layer(p, carry)] * 2, lambda p, carry, x: last(p, carry)]
)
PARAMS = [{"w": torch.eye(8) / (number + 2)} for number in range(4)]


def on_disk(folder):
    return sl.offload("disk", params="disk", folder=folder)


def start(mesh, *transforms, loss=FN):
    return sl.make_train_step(loss, sl.shard(PARAMS, mesh, sl.chain(*transforms)), sl.optim.adamw(1e-2))


def fails_to_read(patch, mesh, after, run):
    """``run()``, in which rank 1 alone cannot read its parameters once; all ranks raise, with the file, and the rank."""
    if mesh.rank == 1:
        Faults(patch).fails("preadv", BROKEN, f"{FOLDER}/rank-1", after=after, times=1)
    with pytest.raises(
        StorageError if mesh.rank == 1 else RankFailure, match=r"reading .*rank-1.*use another disk"
    ) as met:
        run()
    assert mesh.rank == 1 or "rank 1: StorageError: " in str(met.value)
    return met.value


MESHES = {
    "stage 0": ([sl.zero(0)], {"data": 2}),
    "stage 2, bf16": ([sl.zero(2), sl.precision("bf16")], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "stage 3, accumulated": ([sl.zero(3), sl.accumulate(2)], {"data": 2}),
    "tiles": ([sl.zero(3), sl.tile(["0/w"], 2)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=2)], {"pipe": 2}),
}  # fmt: skip


@pytest.mark.parametrize("plan", MESHES)
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("after", [1, 4], ids=["forward", "backward"])
def test_a_step_ends_on_all_ranks_and_its_state_trains_further(tmp_path, monkeypatch, plan, steps, after):
    transforms, shape = MESHES[plan]
    after = 2 if plan == "pipeline" and after == 4 else after

    def run(mesh, fault, *offload):
        state, step = start(mesh, *transforms, *offload)
        for number in range(4):
            if fault and number == steps:
                with monkeypatch.context() as patch:
                    error = fails_to_read(patch, mesh, after, partial(step, state, X))
                assert any("the state that were given can be" in note for note in error.__notes__)
                assert state.step == number
            state, _ = step(state, X)
        return sl.unshard(state.params)

    wanted = sl.simulate(run, False, mesh=shape)
    assert_same(sl.simulate(run, True, on_disk(tmp_path), mesh=shape), wanted)


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
def test_a_loss_that_refuses_zeros_is_not_what_is_said(tmp_path, monkeypatch, steps):
    def loss(params, x):
        for each in params[:-1]:
            x = layer(each, x)
            if not x.any():
                raise ValueError("nothing but zeros")
        return last(params[-1], x)

    def run(mesh, fault, *offload):
        state, step = start(mesh, sl.zero(3), *offload, loss=loss)
        for number in range(4):
            if fault and number == steps:
                with monkeypatch.context() as patch:
                    fails_to_read(patch, mesh, 1, partial(step, state, X))
            state, _ = step(state, X)
        return sl.unshard(state.params)

    wanted = sl.simulate(run, False, mesh={"data": 2})
    assert_same(sl.simulate(run, True, on_disk(tmp_path), mesh={"data": 2}), wanted)


@pytest.mark.parametrize("calls", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("stage, means", [(0, True), (3, True), (3, False)])
def test_an_evaluation_ends_on_all_ranks(tmp_path, monkeypatch, calls, stage, means):
    """Those that its means are over, or that gather parameters with each other."""

    def score(params, x):
        total = FN(params, x)
        return sl.Mean(total, 1) if means else total.detach()

    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), on_disk(tmp_path)))
        evaluate = sl.make_eval_step(score, params)
        for _ in range(calls):
            evaluate(params, X)
        with monkeypatch.context() as patch:
            fails_to_read(patch, mesh, 1, partial(evaluate, params, X))
        if means:
            with monkeypatch.context() as patch:
                fails_to_read(patch, mesh, 5, partial(evaluate.over, params, [X, X, X]))
        return float(evaluate(params, X))

    assert sl.simulate(run, mesh={"data": 2}) == [float(FN(PARAMS, X))] * 2


def test_gradients_without_a_step_too(tmp_path, monkeypatch):
    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(3), on_disk(tmp_path)))
        grad = sl.value_and_grad(FN)
        with monkeypatch.context() as patch:
            fails_to_read(patch, mesh, 1, partial(grad, params, X))
        return float(grad(params, X)[0])

    assert sl.simulate(run, mesh={"data": 2}) == [float(FN(PARAMS, X))] * 2


def test_alone_the_loss_function_does_not_go_on(tmp_path, monkeypatch):
    """What raises is the read, in its use."""
    seen = []

    def loss(params, x):
        for each in params[:-1]:
            x = layer(each, x)
            seen.append(len(seen))
        return last(params[-1], x)

    state, step = start(sl.make_mesh(), on_disk(tmp_path), loss=loss)
    state, _ = step(state, X)
    seen.clear()
    files = state.params.on_disk.files
    third, fetch = list(state.params.buffers)[2], files._fetch  # which is asked for when the second is used

    def broken(name):
        if name == third:
            raise StorageError(f"reading {name}")
        return fetch(name)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_fetch", broken)
        with pytest.raises(StorageError, match="reading"):
            step(state, X)
    assert seen == [0]
    step(state, X)

"""Parameters on disk after what has failed: the values, the memory and the files are there for the next attempt."""

import gc
import time

import optree
import pytest
import torch
from helpers.cuts import tiny_blocks
from helpers.faults import FULL, Faults
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import RankFailure, StorageError
from shardlib.sharded.disk import pool
from shardlib.sharded.params_on_disk import ParamsOnDisk

FOLDER = "parameters"

PARAMS = {"layers": [{"w": torch.eye(8) / (number + 2)} for number in range(8)]}
X = torch.ones(4, 8)


def loss(params, x):
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"])
    return x.square().mean()


def on_disk(folder, **options):
    return sl.offload("disk", params="disk", folder=folder, **options)


def start(mesh, *transforms, **options):
    return sl.make_train_step(loss, sl.shard(PARAMS, mesh, sl.chain(*transforms)), sl.optim.adamw(1e-2), **options)


def tenfold(params):
    return optree.tree_map(lambda leaf: leaf * 10, params)


def raising(real, error):
    """A function that raises at its second call and at no other."""
    calls = []

    def once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(*args, **kwargs)

    return once


@pytest.mark.parametrize("call", ["read", "interrupt"])
def test_a_use_that_fails_gives_its_memory_back(tmp_path, monkeypatch, call):
    params = sl.shard(PARAMS, sl.make_mesh(), on_disk(tmp_path))
    evaluate = sl.make_eval_step(loss, params)
    wanted = evaluate(params, X)
    files = params.on_disk.files
    for _ in range(8):  # more often than the pool has blocks
        with monkeypatch.context() as patch:
            if call == "read":
                error = torch.OutOfMemoryError("no memory")
                patch.setattr(torch.Tensor, "clone", raising(torch.Tensor.clone, error))
            else:
                error = KeyboardInterrupt()
                patch.setattr(pool, "wait", raising(pool.wait, error))
            with pytest.raises(type(error)):
                evaluate(params, X)
    assert evaluate(params, X) == wanted
    files.roll_back()  # what is announced is given back too
    assert not files.store._pool._lent


def test_a_tree_of_a_skipped_step_does_not_see_later_values(tmp_path):
    state, step = start(sl.make_mesh(), on_disk(tmp_path), nonfinite="skip")
    state, metrics = step(state, X * float("nan"))
    assert not metrics["finite"]
    kept = state.params
    state.params = tenfold(kept)
    with pytest.raises(Exception):  # noqa: B017 - whatever it is
        step(state, "not a batch")
    with pytest.raises(sl.errors.DonatedStateError):
        sl.unshard(kept)


def test_assigned_parameters_that_cannot_be_written_change_nothing(tmp_path, monkeypatch):
    """On any rank; the next attempt succeeds."""

    def run(mesh, fault):
        state, step = start(mesh, sl.zero(1), *([on_disk(tmp_path)] if fault else []))
        state, _ = step(state, X)
        kept, before = state.params, sl.unshard(state.params)
        state.params = tenfold(kept)
        if fault:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    Faults(patch).fails("pwritev", FULL, f"{FOLDER}/rank-1", times=1)
                with pytest.raises(StorageError if mesh.rank else RankFailure):
                    step(state, X)
            assert_same(sl.unshard(kept), before)
        state, _ = step(state, X)
        return sl.unshard(state.params)

    assert_same(sl.simulate(run, True, mesh={"data": 2}), sl.simulate(run, False, mesh={"data": 2}))


def test_a_restore_that_fails_can_be_made_again(tmp_path, monkeypatch):
    state, step = start(sl.make_mesh(), on_disk(tmp_path / "files"))
    state, _ = step(state, X)
    saved = sl.unshard(state.params)
    sl.checkpoint.save(tmp_path / "run", state)
    state, _ = step(state, X)
    with monkeypatch.context() as patch:
        Faults(patch).fails("pwritev", FULL, f"{FOLDER}/rank", times=1)
        with pytest.raises(StorageError):
            sl.checkpoint.restore(tmp_path / "run", state)
    state = sl.checkpoint.restore(tmp_path / "run", state)
    assert_same(sl.unshard(state.params), saved)
    step(state, X)


def test_files_close_when_a_disk_thread_collects_them(tmp_path, monkeypatch):
    mesh = sl.make_mesh()
    params = sl.shard(PARAMS, mesh, on_disk(tmp_path))
    threads = params.on_disk.files.store._threads
    cycle = [params]
    cycle.append(cycle)
    gc.disable()
    try:
        del params, cycle
        threads.submit(gc.collect).result(30)
    finally:
        gc.enable()
    until = time.monotonic() + 30
    while True:
        try:
            sl.shard(PARAMS, mesh, on_disk(tmp_path))
            break
        except StorageError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_with_states_on_the_device_a_failed_write_ends_the_step_on_all_ranks(tmp_path, monkeypatch):
    def run(mesh):
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), on_disk(tmp_path / "files", fraction=0.0))
        state, _ = step(state, X)
        with monkeypatch.context() as patch:
            if mesh.rank:
                Faults(patch).fails("pwritev", FULL, f"{FOLDER}/rank-1", times=1)
            with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
                step(state, X)
        return refused.value.__notes__[0]

    for note in sl.simulate(run, mesh={"data": 2}):
        assert note == "The states are lost (they were updated in place): restore a checkpoint"


def test_parameters_alone_on_disk_are_there_once(tmp_path):
    """The state is not copied: neither by a save that goes on beside the run, nor for two holders."""
    state, step = start(sl.make_mesh(), on_disk(tmp_path / "files", fraction=0.0))
    state, _ = step(state, X)
    manager = sl.checkpoint.Manager(tmp_path / "run")
    manager.save(state)
    assert manager._running is None
    with pytest.raises(sl.errors.IllegalComposition, match="what is on disk is there once"):
        sl.replace_params(state, state.params, donate=False)


def test_stages_read_each_bucket_once(tmp_path, monkeypatch):
    read, real = {}, ParamsOnDisk.get
    monkeypatch.setattr(
        ParamsOnDisk, "get", lambda self, name: (read.setdefault(self.mesh.rank, []).append(name), real(self, name))[1]
    )
    _, params = tiny_blocks()

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.pipeline("1f1b", microbatches=2), on_disk(tmp_path)))
        sl.unshard(sharded)
        return len(sharded.buffers)

    held = sl.simulate(run, mesh={"pipe": 2})
    assert [len(read[rank]) for rank in (0, 1)] == held

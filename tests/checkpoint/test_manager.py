"""A manager saves while training goes on: what it saves is the state at the call, and its errors reach every rank."""

import os
import threading
import time

import pytest
import torch
from helpers.models import mlp, regression_batch, share
from helpers.saved import tensors

import shardlib as sl
from shardlib.checkpoint.commit import Commit
from shardlib.collectives.primitives import all_gather_object
from shardlib.errors import CheckpointError

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(12, 5, 3)


def start(mesh, stage=2):
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=stage), sl.optim.adamw(0.1))


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes to data files wait until they are let go."""
    go, written = threading.Event(), os.pwritev

    def pwritev(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
            assert go.wait(60)
        return written(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return go


def test_a_snapshot_does_not_change(tmp_path, slow_disk):
    """The disk is written only after four further steps, whose states took over the memory of the saved one."""

    def run(mesh):
        state, step = start(mesh)
        state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
        with sl.checkpoint.Manager(tmp_path / "later") as manager:
            manager.save(state, notes={"at": 1})
            now = [buffer.clone() for buffer in state.params.buffers.values()]
            for _ in range(4):
                state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
                manager.step(state)
                assert manager.latest() is None
            all_gather_object(mesh, ["data"], None)
            slow_disk.set()
        fresh, _ = start(mesh)
        fresh = manager.restore(fresh)
        same = all(torch.equal(a, b) for a, b in zip(now, fresh.params.buffers.values(), strict=True))
        return same, fresh.step, state.step

    assert sl.simulate(run, mesh={"data": 2}) == [(True, 1, 5)] * 2
    assert sl.checkpoint.read_notes(tmp_path / "later") == {"at": 1}


def test_what_is_saved_in_the_background_is_what_is_saved_at_once(tmp_path):
    def run(mesh):
        state, step = start(mesh, stage=3)
        for _ in range(3):
            state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
        sl.checkpoint.save(tmp_path / "at-once", state)
        with sl.checkpoint.Manager(tmp_path / "behind") as manager:
            manager.save(state)

    sl.simulate(run, mesh={"data": 3})
    one, other = (tensors(sl.checkpoint.latest(tmp_path / name)) for name in ("at-once", "behind"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_so_many_steps_and_the_newest_stay(tmp_path, asynchronous):
    def run(mesh):
        state, step = start(mesh)
        with sl.checkpoint.Manager(tmp_path, keep=2, every=2, asynchronous=asynchronous) as manager:
            for _ in range(9):
                state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
                manager.step(state, notes={"samples": 12 * state.step})

    sl.simulate(run, mesh={"data": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]
    assert sl.checkpoint.read_notes(tmp_path) == {"samples": 96}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", ["step", "save", "wait"])
def test_an_error_reaches_every_rank_at_the_same_call(tmp_path, monkeypatch, rank, at):
    written = os.pwritev

    def pwritev(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"__{rank}_0.distcp"):
            raise OSError(28, "No space left on device")
        return written(fd, buffers, offset)

    def run(mesh):
        state, step = start(mesh)
        manager = sl.checkpoint.Manager(tmp_path, every=1)
        sl.checkpoint.save(tmp_path, state)
        state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
        if mesh.rank == 0:
            monkeypatch.setattr(os, "pwritev", pwritev)
        manager.save(state)
        with pytest.raises(
            CheckpointError, match=f"the checkpoint of step 1 was not written:(\n.*)*rank {rank}: OSError"
        ):
            if at == "step":
                while True:
                    time.sleep(0.02)
                    manager.step(state)
            manager.save(state) if at == "save" else manager.wait()
        return sl.checkpoint.latest(tmp_path).name, state.step

    assert len(set(sl.simulate(run, mesh={"data": 2}))) == 1


def test_a_disk_without_room_for_a_word_of_it(tmp_path, monkeypatch):
    """A rank that can write neither its file nor that it has failed is not waited for."""
    report = Commit._report

    def refused(commit, what):
        if commit._rank == 1:
            raise OSError(28, "No space left on device")
        report(commit, what)

    def run(mesh):
        state, _ = start(mesh)
        manager = sl.checkpoint.Manager(tmp_path)
        manager.save(state)
        with pytest.raises(CheckpointError) as caught:
            manager.wait()
        return str(caught.value)

    monkeypatch.setattr(Commit, "_report", refused)
    (message,) = set(sl.simulate(run, mesh={"data": 3}))
    assert "rank 0: RankFailure: rank 1 has failed" in message and "rank 1: OSError: [Errno 28]" in message


def test_memory_is_reused(tmp_path):
    state, step = start(sl.make_mesh())
    manager = sl.checkpoint.Manager(tmp_path, keep=1, every=1)
    seen = set()
    for _ in range(20):
        state, _ = step(state, BATCH)
        manager.step(state)
        seen.add((manager._snapshot._memory.data_ptr(), manager._snapshot._memory.numel()))
    manager.wait()
    assert len(seen) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": 2.5}, {"every": 0}, {"every": "10"}, {"every": True}])
def test_wrong_numbers_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="are integers from 1"):
        sl.checkpoint.Manager(tmp_path, **wrong)


def test_a_later_step_in_the_folder_is_refused(tmp_path):
    """Else the newest would be that of another run, and saves of this one would be deleted as old ones."""
    state, step = start(sl.make_mesh())
    early, _ = start(sl.make_mesh())
    state, _ = step(state, BATCH)
    sl.checkpoint.save(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"checkpoints of later steps \(step-00000001\) than 0.*another folder"):
        sl.checkpoint.save(tmp_path, early)
    assert sl.checkpoint.save(tmp_path, state).name == "step-00000001.2"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.2"]
    assert sl.checkpoint.save(tmp_path, state).name == "step-00000001"

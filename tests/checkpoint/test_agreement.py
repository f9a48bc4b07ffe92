"""What one rank alone cannot read, or sees otherwise, is an error of all ranks, named by rank, and changes no state."""

import importlib
import os
import shutil
import threading
from pathlib import Path

import pytest
from helpers import saved
from helpers.models import mlp, regression_batch, share

import shardlib as sl
from shardlib.checkpoint import commit
from shardlib.errors import CheckpointError

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(12, 5, 3)


def fresh(mesh, seed=0):
    params = {"layers": [{name: leaf + seed for name, leaf in layer.items()} for layer in PARAMS["layers"]]}
    return sl.make_train_step(LOSS, sl.shard(params, mesh, stage=3), sl.optim.adamw(0.1))


def save(mesh, folder, steps=1):
    state, step = fresh(mesh)
    for _ in range(steps):
        state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
        sl.checkpoint.save(folder, state, keep=9)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    sl.simulate(save, folder, 2, mesh={"data": 3})
    return folder


def refused(folder):
    def start(mesh):
        RANK.number = mesh.rank
        return fresh(mesh, seed=1)[0]

    return saved.refused(start, folder, 3)


RESTORE = importlib.import_module("shardlib.checkpoint.restore")  # the file, not the function
RANK = threading.local()  # a simulated rank is a thread


def on_rank(rank, patch, name, file, instead):
    """Let one rank see another file system: ``instead(real, path, ...)`` runs for calls of a function on a file."""
    owner = Path if name == "read_bytes" else os
    real = getattr(owner, name)

    def seen(path, *args, **kwargs):
        if getattr(RANK, "number", None) == rank and str(path).endswith(file):
            return instead(real, path, *args, **kwargs)
        return real(path, *args, **kwargs)

    patch.setattr(owner, name, seen)


def denied(real, path, *args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_manifest_that_one_rank_cannot_read(good, monkeypatch, rank):
    on_rank(rank, monkeypatch, "read_bytes", "manifest.json", denied)
    message = refused(good)
    assert f"  - rank {rank}: CheckpointError: {good / 'step-00000002' / 'manifest.json'} cannot be read" in message
    assert "Permission denied" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_data_file_that_one_rank_cannot_open(good, monkeypatch, rank):
    on_rank(rank, monkeypatch, "open", "__1_0.distcp", denied)
    assert "__1_0.distcp: cannot be read ([Errno 13] Permission denied" in refused(good)


def test_a_file_that_one_rank_does_not_see(good, monkeypatch):
    def absent(real, path, *args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    on_rank(1, monkeypatch, "stat", "__0_0.distcp", absent)
    on_rank(1, monkeypatch, "open", "__0_0.distcp", absent)
    assert "__0_0.distcp: cannot be read ([Errno 2] No such file" in refused(good)


def test_another_manifest_at_the_same_place(good, tmp_path, monkeypatch):
    """Rank 1 sees what was there before."""
    folder = tmp_path / "step-00000002"
    shutil.copytree(good / "step-00000002", folder)
    other = (good / "step-00000001" / "manifest.json").read_bytes()
    on_rank(1, monkeypatch, "read_bytes", "manifest.json", lambda real, path: other)
    assert f"{folder} cannot be restored:\n  - rank 1: another manifest than rank 0 sees\n" in refused(folder)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_0_decides_which_is_the_newest(good, monkeypatch, late):
    """A rank whose file system lags sees only the first of two checkpoints."""
    listed = commit.complete

    def complete(folder):
        found = listed(folder)
        return found[:1] if getattr(RANK, "number", None) == late else found

    monkeypatch.setattr(commit, "complete", complete)

    def run(mesh):
        RANK.number = mesh.rank
        return sl.checkpoint.Manager(good).restore(fresh(mesh)[0]).step

    assert sl.simulate(run, mesh={"data": 3}) == [1 if late == 0 else 2] * 3


def test_no_checkpoint_is_said_alike(tmp_path):
    def run(mesh):
        with pytest.raises(FileNotFoundError, match="is no complete checkpoint and holds none"):
            sl.checkpoint.restore(tmp_path, fresh(mesh)[0])

    sl.simulate(run, mesh={"data": 3})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_late_stops_all_ranks(good, monkeypatch, rank):
    """After the verification, which reads each byte on one rank."""
    real = os.preadv
    verified = threading.Event()

    def preadv(fd, buffers, offset):
        if verified.is_set() and getattr(RANK, "number", None) == rank:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    checked = RESTORE.check_intact

    def check_intact(*args):
        checked(*args)
        verified.set()

    monkeypatch.setattr(RESTORE, "check_intact", check_intact)
    monkeypatch.setattr(os, "preadv", preadv)

    def run(mesh):
        RANK.number = mesh.rank
        with pytest.raises(CheckpointError) as caught:
            sl.checkpoint.restore(good, fresh(mesh)[0])
        return str(caught.value)

    messages = set(sl.simulate(run, mesh={"data": 2}))
    assert len(messages) == 1 and f"rank {rank}: OSError: [Errno 5] Input/output error" in messages.pop()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_parameters_that_one_rank_cannot_open(tmp_path, monkeypatch, rank):
    params = sl.shard(PARAMS, sl.make_mesh())
    sl.checkpoint.export_safetensors(tmp_path, params)
    on_rank(rank, monkeypatch, "open", "model.safetensors", denied)

    def run(mesh):
        RANK.number = mesh.rank
        with pytest.raises(
            CheckpointError, match=r"model.safetensors: cannot be read \(\[Errno 13\] Permission denied"
        ):
            sl.checkpoint.import_safetensors(tmp_path, sl.shard(PARAMS, mesh, stage=3))

    sl.simulate(run, mesh={"data": 2})

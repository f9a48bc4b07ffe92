"""A crash at any operation of a save leaves the old checkpoint or the new one, whole; and deletions leave no half of one."""

import subprocess
import sys

import pytest
from helpers.crashes import Recorder, crashes, write
from helpers.models import mlp, regression_batch, share
from helpers.profile import NIGHTLY
from helpers.saved import tensors

import shardlib as sl
from shardlib.checkpoint.reading import open_checkpoint
from shardlib.checkpoint.save import prepared, saved_fragments

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(12, 5, 3)
EACH = 40 if NIGHTLY else 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_crash_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, ranks):
    """Three saves that keep one, so that two delete what was there. What a save that has returned promised, is there."""
    root = tmp_path / "run"
    root.mkdir()
    promised, manifests = [], {}

    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=2)
        state, step = sl.make_train_step(LOSS, params, sl.optim.adamw(0.1))
        for number in range(3):
            folder = sl.checkpoint.save(root / "deep" / "checkpoints", state, keep=1)
            if mesh.rank == 0:
                promised.append((len(recorder.log), number))
                manifests[number] = (folder / "manifest.json").read_bytes()
            state, _ = step(state, share(BATCH, mesh.rank, mesh.size))

    with monkeypatch.context() as patch:
        recorder = Recorder(root, patch)
        sl.simulate(run, mesh={"data": ranks})
    states, seen = 0, {}
    for done, found in crashes(recorder.log, EACH, seed=ranks):
        states += 1
        # Only what a look at the folder shows, without writing the files again.
        complete = [path[: -len("/manifest.json")] for path in found if path.endswith("/manifest.json")]
        complete = [path for path in complete if path.rpartition(".")[2] not in ("partial", "deleted")]
        safe = max((number for at, number in promised if at <= done), default=None)
        after = tmp_path / "after"
        write(after, found)
        newest = sl.checkpoint.latest(after / "deep" / "checkpoints")
        if newest is None:
            assert safe is None and not complete
        else:
            step = int(newest.name.removeprefix("step-"))
            assert safe is None or step >= safe
            seen[step] = seen.get(step, 0) + 1
            for path in complete:  # every one that is listed is whole
                with open_checkpoint(after / path) as saved:
                    assert saved.damages() == []
                    assert (after / path / "manifest.json").read_bytes() == manifests[saved.manifest.step]
        remove(after)
    print(f"{ranks} ranks: {len(recorder.log)} operations, {states} states of the disk, newest checkpoint {seen}")
    assert set(seen) == {0, 1, 2}


def remove(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_what_a_crash_left_does_not_disturb_the_next_save(tmp_path, monkeypatch):
    """The run goes on in each state that a crash leaves, saves again, and that checkpoint is whole."""
    root = tmp_path / "run"
    root.mkdir()
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.adamw(0.1))
    with monkeypatch.context() as patch:
        recorder = Recorder(root, patch)
        for _ in range(2):
            sl.checkpoint.save(root, state, keep=1)
            state, _ = step(state, BATCH)
    wanted = None
    for number, (_, found) in enumerate(crashes(recorder.log, each=0)):
        after = tmp_path / f"after-{number}"
        after.mkdir()
        write(after, found)
        saved = tensors(sl.checkpoint.save(after, state, keep=1))
        wanted = wanted or saved
        assert saved.keys() == wanted.keys() and [path.name for path in after.iterdir()] == ["step-00000002"]


def attempt(folder, state):
    """An attempt to save, prepared."""
    return prepared(folder, state, 3, None)


def test_attempts_do_not_disturb_each_other(tmp_path):
    """A thread of an earlier run still writes while a new run saves the same step: both checkpoints are whole."""
    state, _ = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.adamw(0.1))
    early = attempt(tmp_path, state)
    late = attempt(tmp_path, state)
    late.write(saved_fragments(state, None))
    early.write(saved_fragments(state, None))
    first = late.finish()
    with open_checkpoint(first) as saved:
        assert saved.damages() == []
    second = early.finish()
    with open_checkpoint(second) as saved:
        assert saved.damages() == []
    assert [path.name for path in tmp_path.iterdir()] == [second.name] == [sl.checkpoint.latest(tmp_path).name]


def test_what_nobody_writes_any_more_is_removed(tmp_path):
    state, _ = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.adamw(0.1))
    early = attempt(tmp_path, state)
    early.write(saved_fragments(state, None))
    (stale,) = tmp_path.iterdir()
    del early
    late = attempt(tmp_path, state)
    assert not stale.exists() and len(list(tmp_path.iterdir())) == 1
    # Another process, which ends.
    (kept,) = tmp_path.iterdir()
    del late
    program = (
        f"import fcntl, os; fd = os.open({str(kept)!r}, 0); fcntl.flock(fd, 2); print('locked', flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    later = attempt(tmp_path, state)
    assert kept.exists() and len(list(tmp_path.iterdir())) == 2
    other.kill()
    other.wait()
    last = attempt(tmp_path, state)
    assert not kept.exists()
    for each in (later, last):
        each.write(saved_fragments(state, None))
        each.finish()
    assert len(list(tmp_path.iterdir())) == 1

"""A scheduler's signals: all ranks save the same step, once, and end with a code that says which signal it was."""

import os
import signal
import time

import pytest
from helpers.models import mlp, regression_batch, share

import shardlib as sl
from shardlib.mesh.launch import supervised

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(12, 5, 3)


@pytest.fixture
def former():
    """The signals that reach this process's own handlers."""
    found = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in supervised.STOPPING}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def train(mesh, folder, steps, receives=lambda step: (), every=None, **options):
    """From the newest checkpoint on; ``receives(step)`` are the signals that arrive in the middle of a step."""

    def loss(params, batch):
        for number in receives(at[0] + 1):
            os.kill(os.getpid(), number)
        return LOSS(params, batch)

    at = [0]
    state, step = sl.make_train_step(loss, sl.shard(PARAMS, mesh, stage=2), sl.optim.adamw(0.1))
    code = None
    try:
        with sl.checkpoint.Manager(folder, every=every, **options) as manager:
            if manager.latest():
                state = manager.restore(state)
            while state.step < steps:
                at[0] = state.step
                state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
                manager.step(state, notes={"at": state.step})
    except SystemExit as end:
        code = end.code
    return code, state.step


def saved(folder):
    """The steps of the checkpoints in a folder, and the newest one's notes."""
    return [sl.checkpoint.step_of(path) for path in sl.checkpoint.complete(folder)], sl.checkpoint.read_notes(folder)


@pytest.mark.parametrize("rank, number, code", [(1, signal.SIGUSR1, 138), (0, signal.SIGTERM, 143)])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(pool, tmp_path, rank, number, code):
    def run(mesh):
        before = signal.getsignal(number)
        end = train(mesh, tmp_path, 9, lambda step: [number] * (mesh.rank == rank and step == 4))
        return end, signal.getsignal(number) == before

    assert pool.run(run, mesh={"data": 2}) == [((code, 4), True)] * 2
    assert saved(tmp_path) == ([4], {"at": 4})
    assert train(sl.make_mesh(), tmp_path, 9) == (None, 9)


@pytest.mark.parametrize("every", [None, 2, 3])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_state_is_saved_once(tmp_path, former, every, asynchronous):
    """Be it due or not, and an earlier save running or not. What a launcher passes on as well is the same signal."""
    twice = lambda step: [signal.SIGUSR1, signal.SIGUSR1] * (step == 4)  # noqa: E731
    assert train(sl.make_mesh(), tmp_path, 9, twice, every, asynchronous=asynchronous) == (138, 4)
    assert saved(tmp_path) == ({None: [4], 2: [2, 4], 3: [3, 4]}[every], {"at": 4})
    assert [path.name for path in tmp_path.iterdir() if "." in path.name] == [] == former


def test_an_end_waits_for_its_save(tmp_path, former, monkeypatch):
    """The checkpoint is there when the program is told of the end, though its thread is slow."""
    written = os.pwritev

    def pwritev(fd, buffers, offset):
        time.sleep(0.05)
        return written(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    found = []
    monkeypatch.setattr(sl.checkpoint.Manager, "__exit__", lambda self, kind, *_: found.append((kind, self.latest())))
    assert train(sl.make_mesh(), tmp_path, 9, lambda step: [signal.SIGTERM] * (step == 2)) == (143, 2)
    assert found == [(SystemExit, tmp_path / "step-00000002")]


def test_a_later_signal_acts_as_before(tmp_path, former, monkeypatch):
    monkeypatch.setattr(supervised, "_AGAIN", -1.0)
    twice = lambda step: [signal.SIGTERM, signal.SIGTERM] * (step == 2)  # noqa: E731
    assert train(sl.make_mesh(), tmp_path, 9, twice) == (143, 2)
    assert former == [signal.SIGTERM]


def test_ctrl_c_where_it_is_asked_for(tmp_path, monkeypatch):
    """A second one stops at once. Jobs in the background of a shell ignore it."""
    mesh, once = sl.make_mesh(), lambda step: [signal.SIGINT] * (step == 4)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert train(mesh, tmp_path, 9, once, interrupt=True) == (130, 4) and saved(tmp_path) == ([4], {"at": 4})
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            train(mesh, tmp_path / "unasked", 9, once)
        monkeypatch.setattr(supervised, "_PRESSED", -1.0)
        with pytest.raises(KeyboardInterrupt):
            train(mesh, tmp_path / "twice", 9, lambda step: 2 * once(step), interrupt=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert train(mesh, tmp_path / "ignored", 9, once, interrupt=True) == (None, 9)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_before_the_first_step_or_after_the_last_acts_as_before(tmp_path, former):
    with sl.checkpoint.Manager(tmp_path):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert former == [signal.SIGUSR1]
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.adamw(0.1))
    with sl.checkpoint.Manager(tmp_path, every=1) as manager:
        state, _ = step(state, BATCH)
        manager.step(state)
        os.kill(os.getpid(), signal.SIGTERM)
        assert former == [signal.SIGUSR1]
    assert former == [signal.SIGUSR1, signal.SIGTERM] and saved(tmp_path)[0] == [1]
    manager.step(state)  # outside of the context
    os.kill(os.getpid(), signal.SIGTERM)
    assert former == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]


def test_no_handlers_without_a_context_or_outside_the_main_thread(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def run(mesh):
        state, _ = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh), sl.optim.adamw(0.1))
        with sl.checkpoint.Manager(tmp_path) as manager:
            manager.step(state)
            return signal.getsignal(signal.SIGTERM)

    assert sl.simulate(run, mesh={"data": 2}) == [before] * 2
    state, _ = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.adamw(0.1))
    sl.checkpoint.Manager(tmp_path).step(state)
    assert signal.getsignal(signal.SIGTERM) == before

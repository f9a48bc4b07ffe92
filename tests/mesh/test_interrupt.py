"""Ctrl-C ends a simulation and its ranks, whatever they are doing."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import shardlib as sl
from shardlib.mesh.transport import simulation


@pytest.fixture(autouse=True)
def listening():
    """Ctrl-C raises, in a shell's background job too, which begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ranks():
    return [thread for thread in threading.enumerate() if thread.name.startswith("simulated rank")]


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupted(run, shape):
    """The exception of an interrupted simulation, once it has ended."""
    before = ranks()
    with pytest.raises(KeyboardInterrupt) as caught:
        sl.simulate(run, mesh=shape)
    assert ranks() == before
    return caught.value


def gather():
    sl.collectives.all_gather(torch.ones(1), "data")


@pytest.mark.parametrize("stopper", [0, 2])
def test_ranks_stop_at_their_next_collective(stopper):
    steps, cleaned = [0] * 3, []

    def run(mesh):
        try:
            while True:
                steps[mesh.rank] += 1
                if mesh.rank == stopper and steps[mesh.rank] == 3:
                    press_ctrl_c()
                gather()
        finally:
            cleaned.append(mesh.rank)

    error = interrupted(run, {"data": 3})
    assert not hasattr(error, "__notes__")
    assert sorted(cleaned) == [0, 1, 2] and max(steps) < 100_000
    assert sl.simulate(lambda mesh: mesh.rank, mesh={"data": 3}) == [0, 1, 2]  # and the next one is none the worse


def test_a_rank_that_catches_errors_and_tries_again_stops_too():
    def run(mesh):
        if mesh.rank == 0:
            press_ctrl_c()
        while True:
            try:
                gather()
            except Exception:
                continue

    interrupted(run, {"data": 2})


def test_an_interrupt_after_a_failure_of_another_rank():
    def run(mesh):
        if mesh.rank == 0:
            raise KeyError("mine")
        while True:
            try:
                gather()
            except Exception:
                continue

    with pytest.raises(KeyError, match="mine"):
        sl.simulate(run, mesh={"data": 2})
    assert not ranks()


def test_a_rank_in_a_loop_without_collectives_stops_too(monkeypatch):
    monkeypatch.setattr(simulation, "_PATIENCE", 0.2)

    def run(mesh):
        if mesh.rank == 1:
            press_ctrl_c()
            while True:
                torch.ones(1)
        gather()

    interrupted(run, {"data": 3})


def test_a_rank_that_cannot_be_stopped_is_named(monkeypatch):
    """One long call of an operation; the other ranks do not wait for it."""
    monkeypatch.setattr(simulation, "_PATIENCE", 0.1)

    def run(mesh):
        if mesh.rank == 1:
            press_ctrl_c()
            held.acquire()  # no instruction of Python's comes before it ends
        gather()

    held = threading.Lock()
    held.acquire()
    with pytest.raises(KeyboardInterrupt) as caught:
        sl.simulate(run, mesh={"data": 3})
    (note,) = caught.value.__notes__
    assert "simulated rank 1 still computes" in note and "held.acquire()" in note
    assert len(ranks()) == 1
    held.release()
    ranks()[0].join(30)
    assert not ranks()


def test_an_interrupt_stops_a_simulation_inside_a_simulation():
    def inner(mesh):
        if mesh.rank == 0:
            press_ctrl_c()
        while True:
            sl.collectives.all_gather(torch.ones(1), "x")

    interrupted(lambda mesh: sl.simulate(inner, mesh={"x": 2}), {"data": 2})


def test_a_second_interrupt_waits_no_longer(monkeypatch):
    monkeypatch.setattr(simulation, "_PATIENCE", 600.0)
    held, noticed = threading.Lock(), threading.Event()
    held.acquire()
    wait = simulation._await
    monkeypatch.setattr(simulation, "_await", lambda threads: (noticed.set(), wait(threads)))

    def run(mesh):
        if mesh.rank == 0:
            press_ctrl_c()
            noticed.wait(60)
            press_ctrl_c()
            held.acquire()
        gather()

    with pytest.raises(KeyboardInterrupt) as caught:
        sl.simulate(run, mesh={"data": 2})
    assert "simulated rank 0 still computes" in caught.value.__notes__[0]
    held.release()
    for thread in ranks():
        thread.join(30)
    assert not ranks()


# Where tabulate is installed, torch imports it at the end, for a report of its compiler's: the process then ends with 1.
TRAINING = """
import sys
sys.modules["tabulate"] = None
import torch, shardlib as sl
def run(mesh):
    params = sl.shard({"w": torch.ones(4, 4)}, mesh, stage=3)
    state, step = sl.make_train_step(lambda p, x: (x @ p["w"]).square().mean(), params, sl.optim.sgd(0.1))
    while True:
        state, _ = step(state, torch.ones(2, 4))
        if mesh.rank == 0 and state.step == 3:
            print("training", flush=True)
sl.simulate(run, mesh={"data": 3})
"""


def test_a_process_that_is_interrupted_ends_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt") and "terminate" not in errors

"""The commands that measure a machine and search for a plan on it."""

import math
import os
import time

import pytest
import torch

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.commands import measure
from shardlib.commands.measure import _least_squares
from shardlib.plan import Link, Machine

SIZES = ["--layers", "1", "--width", "32", "--heads", "2", "--sequence", "16", "--batch", "2"]


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.json"
    Machine("1GiB", {"fp32": 1e10}, Link(1e9, 1e-5), ranks_per_host=2, launches=1e5).write(path)
    return path


def test_the_search_prints_what_it_found_and_verifies_it(machine, tmp_path, capsys):
    picture = tmp_path / "front.png"
    job = ["plan", "--search", "--machine", str(machine), "--ranks", "2", "--front", str(picture), "--verify", "1"]
    assert cli.main([*job, *SIZES]) == 0
    out = capsys.readouterr().out
    assert "sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(" in out
    assert "predicted" in out and "measured" in out and picture.stat().st_size > 1000


def test_the_search_says_why_nothing_fits(machine, capsys):
    assert (
        cli.main(["plan", "--search", "--machine", str(machine), "--ranks", "2", "--device-memory", "1kB", *SIZES]) == 1
    )
    assert "parameters and states exceed device memory" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--search needs a machine: --machine FILE"):
        cli.main(["plan", "--search", *SIZES])


@pytest.mark.nightly
def test_the_search_keeps_the_limits(machine, capsys):
    """What a device cannot hold goes to the host, or to its disks, where there is room for it, shared by its ranks."""
    search = ["plan", "--search", "--machine", str(machine), "--ranks", "2", *SIZES]

    def searched(*limits, status=0):
        assert cli.main([*search, *limits]) == status
        return capsys.readouterr().out

    device = ["--device-memory", "200kB"]
    assert "offload" not in searched() and "exceed device memory" in searched(*device, status=1)
    assert "sl.offload(" in searched(*device, "--host-memory", "1MiB")
    assert "exceed host memory" in searched(*device, "--host-memory", "60kB", status=1)
    assert "disk" in searched(*device, "--disk", "1MiB").split("sl.make_plan(", 1)[1]
    assert "exceed disk memory" in searched(*device, "--disk", "60kB", status=1)
    assert "several hosts of 1: give the machine's link between=" in searched("--ranks-per-host", "1", status=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--search", "--verify", "-1"], "argument --verify: '-1' is not an integer of at least 0"),
        (["--search", "--ranks", "0"], "argument --ranks: '0' is not an integer of at least 1"),
        (
            ["--search", "--mesh", "data=2", "--stage", "1"],
            "chooses the mesh and the sharding: leave out --mesh, --stage",
        ),
        (["--verify", "2"], "without --search nothing is searched: leave out --machine, --verify"),
    ],
)
def test_arguments_that_a_search_cannot_use_are_refused(machine, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--machine", str(machine), *arguments, *SIZES])
    assert message in f"{stopped.value}{capsys.readouterr().err}"


def test_what_doctor_measures_is_a_machine(tmp_path, capsys):
    path = tmp_path / "machine.json"
    assert cli.main(["doctor", "--measure", "--out", str(path)]) == 0
    machine = Machine.read(path)
    assert str(machine) in capsys.readouterr().out
    assert {"down", "up", "update"} == set(machine.ways) and min(machine.ways.values()) > 1e7


def test_seconds_of_computing_are_the_processors(monkeypatch):
    """What a rank waits for does not count, and ranks that are more than processors share them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    threads = torch.get_num_threads()

    def measured(mesh):
        return measure._busy(mesh), measure._computing(mesh, lambda: time.sleep(0.02))

    for busy, slept in sl.simulate(measured, mesh={"data": 4}):
        assert busy == 4 * threads / 2
        assert slept < busy * 0.01

    def spinning(mesh):
        def spin():
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass

        return measure._computing(mesh, spin)

    assert all(0.01 <= seconds / max(1, 2 * threads) < 0.02 for seconds in sl.simulate(spinning, mesh={"data": 4}))


def test_waiting_for_small_sums_is_more_than_sending_them():
    """Ranks that compute between exchanges wait for the slowest, which a bare exchange does not show."""

    def measured(mesh):
        def exchange():
            time.sleep(0.01 * (mesh.rank == 1))  # well above what a busy machine adds
            mesh.group("data").all_gather_object(None)

        return measure._waits(mesh, exchange)

    first, second = sl.simulate(measured, mesh={"data": 2})
    assert first == second and 0.01 < first < 0.06


@pytest.mark.nightly
def test_ranks_measure_their_machine_together():
    first, second = sl.launch(measure.measure_machine, mesh={"data": 2}, timeout=300)
    assert first == second and first.ranks_per_host == 2
    assert math.inf > first.updating > 0 and math.inf > first.launches > 100
    for link in (first.inside, first.inside.sums):
        assert 1e6 < link.bandwidth < math.inf and 0 <= link.latency < 0.1 and link.processor < 1e-6


def test_overheads_are_not_negative():
    import numpy as np

    rows = np.array([[1.0, 2.0, 1.0], [1.0, 4.0, 3.0], [1.0, 8.0, 2.0], [1.0, 1.0, 5.0]])
    exact = _least_squares(["a", "b", "c"], rows, rows @ np.array([3.0, 0.5, 2.0]))
    assert exact == pytest.approx({"a": 3.0, "b": 0.5, "c": 2.0})
    found = _least_squares(["a", "b", "c"], rows, rows @ np.array([3.0, -0.5, 2.0]))
    assert found and all(value >= 0 for value in found.values())
    assert _least_squares(["a"], np.array([[1.0]]), np.array([-1.0])) == {}

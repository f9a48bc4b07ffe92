"""Real processes: what they print comes out, what goes wrong is named, and none outlives the one that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from helpers.models import mlp, regression_batch

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.errors import MeshError, RankFailure
from shardlib.mesh.launch import orphans, processes

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def eventually(condition, limit=200.0):
    """Wait for something that will happen soon, on a busy machine too."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def running(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_ranks_print_and_return_comes_out(capsys, monkeypatch):
    """Line by line, long lines too; a rank that returns first stays until all have."""
    monkeypatch.setattr(processes, "_ASK", 0.05)

    def run(mesh):
        print(f"rank {mesh.rank} é" + "x" * 70_000)
        print(f"careful {mesh.rank}", file=sys.stderr)
        print("no end", end="")
        sl.collectives.all_gather(torch.ones(1), "data")
        if mesh.rank == 1:
            time.sleep(0.7)
        return torch.full((3_000_000,), mesh.rank)

    got = sl.launch(run, mesh={"data": 2}, timeout=90)
    assert [value.sum().item() for value in got] == [0, 3_000_000]
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert sorted(line for line in lines if "é" in line) == [f"rank {rank} é" + "x" * 70_000 for rank in (0, 1)]
    assert lines.count("no end") == 2
    assert {"careful 0", "careful 1"} <= set(err.splitlines())


def test_a_rank_that_ends_without_a_value_is_named():
    def run(mesh):
        if mesh.rank == 1:
            print("the last words")
            os._exit(0)
        sl.collectives.all_gather(torch.ones(1), "data")

    message = r"(?s)rank 1 ended before the function returned, with exit code 0 .*Its last output:\nthe last words"
    with pytest.raises(RankFailure, match=message):
        sl.launch(run, mesh={"data": 2}, timeout=90)


def test_a_rank_that_returns_while_others_wait_for_it(monkeypatch):
    """Long before the timeout."""
    monkeypatch.setattr(processes, "_ASK", 0.2)
    monkeypatch.setattr(processes, "_STUCK", 4)

    def run(mesh):
        if mesh.rank == 0:
            sl.collectives.all_gather(torch.ones(3), "data")

    with pytest.raises(RankFailure, match="rank 0 of 2 would have waited for ever") as caught:
        sl.launch(run, mesh={"data": 2}, timeout=280)
    assert "rank 1 returned; every rank along an axis must make the same calls" in str(caught.value)
    assert "rank 0 waits in all_gather(3 × float32) on axis 'data'" in str(caught.value)
    assert 'sl.collectives.all_gather(torch.ones(3), "data")' in str(caught.value)


def test_a_rank_that_trains_for_longer_than_others(monkeypatch):
    """The report names the step, and the unit that is gathered."""
    monkeypatch.setattr(processes, "_ASK", 0.2)
    monkeypatch.setattr(processes, "_STUCK", 4)
    loss_fn, params = mlp([8, 16, 4])

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.sgd(0.1))
        while state.step < 4 - mesh.rank:
            state, _ = step(state, regression_batch(4, 8, 4))

    gather = r"rank 0 waits in all_gather\(\d+ × float64\) on axis 'data' \(call \d+, for layers/0, in step 3\), at"
    with pytest.raises(RankFailure, match=rf"(?s)rank 0 of 2 would have waited for ever.*rank 1 returned.*{gather}"):
        sl.launch(run, mesh={"data": 2}, timeout=280)


def test_a_timeout_says_what_each_rank_was_doing(monkeypatch, tmp_path):
    """The time is over when they have come to where they stay."""
    marks = [tmp_path / "0", tmp_path / "1"]

    def now():
        return time.monotonic() + 1000 * all(mark.exists() for mark in marks)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=now))

    def run(mesh):
        from shardlib.mesh.transport.activity import here  # this process's own, not what it was when pickled

        def mark():
            while mesh.rank == 0 and not here().waiting:
                time.sleep(0.001)
            marks[mesh.rank].touch()

        threading.Thread(target=mark, daemon=True).start()
        if mesh.rank == 0:
            print("about to wait")
            sl.collectives.all_gather(torch.ones(3), "data")
        time.sleep(300)

    with pytest.raises(RankFailure, match="rank 0, 1 of 2 still ran after 280 s and was stopped") as caught:
        sl.launch(run, mesh={"data": 2}, timeout=280)
    assert "rank 0 waits in all_gather(3 × float32) on axis 'data'" in str(caught.value)
    assert "The last output of rank 0:\nabout to wait" in str(caught.value)


# A program that a shell starts in the background ignores SIGINT, and so do pytest and this script where that started them.
SCRIPT = """
import os, signal, sys, time
import shardlib as sl, torch
signal.signal(signal.SIGINT, signal.default_int_handler)
def run(mesh):
    print("pid", os.getpid(), flush=True)
    sl.collectives.all_gather(torch.ones(1), "data")
    time.sleep(600)
sl.launch(run, mesh={"data": 2})
"""


def test_ranks_end_with_what_started_them(tmp_path):
    """However it ends; and nothing is left behind."""
    ways = [signal.SIGKILL, signal.SIGINT]
    logs = [tmp_path / f"{how.name}.log" for how in ways]
    started = []
    try:
        for log in logs:
            folder = log.with_suffix("")
            folder.mkdir()
            with log.open("w") as file:
                environment = ENVIRONMENT | {"TMPDIR": str(folder)}
                started.append(
                    subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=file, stderr=file)
                )
        eventually(lambda: all(log.read_text().count("pid") == 2 for log in logs))
        for process, how, log in zip(started, ways, logs):
            ranks = [int(line.split()[1]) for line in log.read_text().splitlines()]
            assert all(map(running, ranks))
            process.send_signal(how)
            process.wait(100)
            eventually(lambda ranks=ranks: not any(map(running, ranks)))
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [-9, -2]
    assert logs[1].read_text().rstrip().endswith("KeyboardInterrupt")
    assert [list(log.with_suffix("").glob("shardlib*")) for log in logs] == [[], []]


PARENT = """
import runpy, subprocess, sys, time
child = "import os, runpy, sys, time; sys.platform = sys.argv[2]; runpy.run_path(sys.argv[1])['end_with'](os.getppid()); "
child += "print(os.getpid(), flush=True); time.sleep(600)"
subprocess.run([sys.executable, "-c", child, *sys.argv[1:]])
"""


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_a_process_ends_with_its_parent(platform):
    command = [sys.executable, "-c", PARENT, orphans.__file__, platform]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert running(child)
    parent.kill()
    parent.wait()
    eventually(lambda: not running(child))


def test_ranks_of_torchrun_end_with_it(monkeypatch):
    """A torchrun that is killed cannot stop them."""
    parents = []
    monkeypatch.setattr(cli, "end_with", parents.append)
    monkeypatch.setattr(cli.plan, "run", lambda args: 0)
    for under in (False, True):
        (monkeypatch.setenv if under else monkeypatch.delenv)("TORCHELASTIC_RUN_ID", *(["1"] if under else [False]))
        cli.main(["plan", "--mesh", "data=2", *["--layers", "1", "--width", "16", "--heads", "2", "--sequence", "16"]])
        assert parents == [os.getppid()] * under


def test_functions_that_use_the_package_by_a_global_name_can_be_sent():
    """As those of a script or a notebook: the package is sent by its name."""
    function = eval("lambda: package", {"package": sl})
    assert cloudpickle.loads(cloudpickle.dumps(function))() is sl


def test_a_device_without_an_index_is_the_launcher_s_or_the_current_one(monkeypatch):
    module = SimpleNamespace(device_count=lambda: 4, current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert sl.make_mesh(device="cuda").device == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert sl.make_mesh(device="cuda").device == torch.device("cuda", 2)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(MeshError, match="this process sees no cuda device; pass device='cpu'"):
        sl.make_mesh(device="cuda")

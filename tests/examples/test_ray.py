"""examples/ray/train.py: its ranks in plain processes, and under Ray Train itself."""

import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "ray" / "train.py"
RAY = "ray[default,train]==2.60.0"


def train(folder, steps):
    """What a worker reports."""
    said = []
    worker = runpy.run_path(str(SCRIPT), run_name="example")["train"]
    worker({"out": str(folder), "every": 4, "steps": steps}, said.append)
    return said


def in_a_thread(mesh, folder):
    """As Ray Train calls it, in a process whose group exists."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(train, folder, 8).result()


def test_the_worker_trains_in_a_process_group_that_exists(pool, tmp_path):
    first, *others = pool.run(in_a_thread, tmp_path, mesh={"data": 4})
    assert [each["step"] for each in first] == [4, 8] and first[1]["loss"] < first[0]["loss"]
    assert others == [first] * 3
    # The same, and on, by variables of the environment alone: this process is the only one.
    (more,) = train(tmp_path, 12)
    assert more["step"] == 12


def by_variables(rank, folder, said):
    os.environ["RANK"] = str(rank)
    said.put((rank, train(folder, 8)))


def test_the_worker_trains_in_processes_of_any_launcher(tmp_path, monkeypatch):
    """They have the variables that torch reads, and no others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    processes = multiprocessing.get_context("spawn")
    said = processes.Queue()
    ranks = [processes.Process(target=by_variables, args=(rank, tmp_path, said)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        found = dict(said.get(timeout=120) for _ in ranks)
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    assert [each["step"] for each in found[0]] == [4, 8] and found[0] == found[1]


@pytest.mark.nightly
def test_ray_train_starts_the_ranks_again(tmp_path):
    """In an environment with Ray and this one's packages; one of the two workers is killed."""
    made = tmp_path / "environment"
    venv.create(made, with_pip=True)
    subprocess.run([made / "bin" / "pip", "install", "--quiet", RAY], check=True, timeout=900)
    (packages,) = made.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "here.pth").write_text("\n".join(here))
    log, out = tmp_path / "log", tmp_path / "out"
    variables = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        command = [made / "bin" / "python", SCRIPT, out, "--steps", "400", "--every", "50"]
        job = subprocess.Popen(command, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 600
            while not (out / "checkpoints" / "step-00000100").exists():
                assert job.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            worker = int(re.search(r"RayTrainWorker pid=(\d+)", log.read_text())[1])
            os.kill(worker, signal.SIGKILL)
            assert job.wait(600) == 0, log.read_text()
        finally:
            job.kill()
            job.wait()
    workers = set(re.findall(r"RayTrainWorker pid=(\d+)", log.read_text()))
    assert len(workers) == 4, "two, and two anew"
    assert (out / "checkpoints" / "step-00000400").exists()

"""examples/slurm/train.sbatch on three hosts in namespaces, with slurmctld and slurmd of the system's packages."""

import re
import sys
import time
from pathlib import Path

import pytest
from helpers.slurm import cluster, missing

from benchmarks.network.namespaces import NoNetwork

ROOT = Path(__file__).parents[2]
STEPS = 400
PROGRAM = f"""
import sys, time
import torch
import shardlib as sl

mesh = sl.make_mesh(timeout=60)
target = torch.arange(8.0)
params = sl.shard({{"w": torch.zeros(8)}}, mesh, stage=3)
state, train_step = sl.make_train_step(lambda params, batch: (params["w"] - batch).square().sum(), params, sl.optim.sgd(0.01))
with sl.checkpoint.Manager(sys.argv[1], every=10) as manager:
    if manager.latest():
        state = manager.restore(state)
        mesh.rank or print("goes on from", state.step, flush=True)
    while state.step < {STEPS}:
        state, metrics = train_step(state, target)
        mesh.rank or state.step % 5 or print("after", state.step, float(metrics["loss"]), flush=True)
        time.sleep(0.1)
        manager.step(state)
"""


@pytest.fixture
def slurm(tmp_path):
    if missing():
        pytest.skip(f"needs slurmctld, slurmd and munge: {', '.join(missing())} not found")
    (tmp_path / "cluster").mkdir()
    try:
        with cluster(3, tmp_path / "cluster") as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))


@pytest.mark.nightly
def test_a_job_goes_on_after_preemption_a_host_s_death_and_the_end_of_its_time(slurm, tmp_path, monkeypatch):
    log, program = tmp_path / "log", tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("RANKS", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = slurm.run(
        *("sbatch", "--parsable", "--chdir", str(tmp_path), "--output", str(log)),
        *(str(ROOT / "examples" / "slurm" / "train.sbatch"), str(program), str(tmp_path / "run")),
    ).strip()

    def said(pattern):
        return re.findall(pattern, log.read_text()) if log.exists() else []

    def comes_back(times):
        """It waits in the queue, comes to its turn at once, and goes on."""
        slurm.wait(lambda: slurm.state(job) == "PENDING", 90)
        time.sleep(
            5
        )  # hosts take a start within the second of the end for one that was revoked; Slurm waits two minutes
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        slurm.wait(lambda: len(said(r"goes on from (\d+)")) == times, 120)
        begun = int(said(r"goes on from (\d+)")[-1])
        slurm.wait(lambda: f"after {begun // 5 * 5 + 20} " in log.read_text(), 60)
        return begun

    slurm.wait(lambda: said("after 5 "), 120)
    slurm.run("sbatch", "--partition", "urgent", "--nodes", "3", "--output", "/dev/null", "--wrap", "sleep 1")
    before = comes_back(1)
    last = int(said(r"after (\d+)[^$]*?goes on")[-1])  # what it said before it stopped
    assert before >= last // 5 * 5, "the step that was under way was saved, due or not"

    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as Slurm does before the end of --time
    assert comes_back(2) > before

    hosts = slurm.field(job, "NodeList")
    assert hosts == "host[0-1]"
    slurm.kill(1)
    assert comes_back(3) % 10 == 0, "from the newest checkpoint"
    assert slurm.field(job, "NodeList") == "host[0,2]"
    slurm.wait(lambda: slurm.state(job) == "COMPLETED", 120)
    assert slurm.field(job, "Restarts") == "3"
    losses = [float(loss) for loss in said(r"after \d+ (\S+)")]
    assert losses[-1] < 0.01 * losses[0]

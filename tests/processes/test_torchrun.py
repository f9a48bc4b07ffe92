"""Restarts under torchrun: no operator helps, and the losses are those of a run without faults."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import restarted

import shardlib as sl

RANKS = 3
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def test_torchrun_restarts_after_a_kill_and_a_hang(tmp_path):
    command = [TORCHRUN, "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=6", "-m", "helpers.restarted"]
    ran = subprocess.run(
        [*command, str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout
    assert int((tmp_path / "restarts-0").read_text()) >= 2
    # No rank waits for one that was killed until torchrun kills it too.
    assert "forcefully exiting" not in ran.stdout, ran.stdout
    (whole,) = {tuple(each) for each in sl.simulate(uninterrupted, tmp_path / "whole", mesh={"data": RANKS})}
    for rank in range(RANKS):
        losses = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert {int(step) for step, _ in losses} == set(range(restarted.STEPS))
        for step, loss in losses:
            assert float.fromhex(loss) == pytest.approx(whole[int(step)], rel=1e-12)
    # What the ranks said of the one that slept, before torchrun stopped them.
    for rank in (0, 1):
        said = rf"shardlib: \w+\(.* on axis 'data' \(size 3\) \w.* on rank {rank} \(call \d+, for .*, in step 4, "
        assert re.search(rf"{said}after \d+ s\): rank 2 has not made this call", ran.stdout), ran.stdout
    assert re.search(
        r"shardlib: rank 2 waits in no collective, while other ranks wait; it runs\n.*\n.*sleep\(600\)", ran.stdout
    )


ONE_OF_TWO = """
import os, signal, sys, time
from pathlib import Path
import torch
import shardlib as sl
starts = Path(os.environ["STARTS"])
mesh = sl.make_mesh(timeout=100)
mesh.group("data").all_reduce(torch.ones(1)).wait()
with starts.open("a") as file:
    print(os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
if len(starts.read_text().split()) < 3:
    if starts.name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.mark.nightly
def test_agents_that_count_their_own_restarts(tmp_path):
    """One agent's rank is killed, twice. The other agent starts its rank anew each time, and counts no restart."""
    script = tmp_path / "script.py"
    script.write_text(ONE_OF_TWO)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        end = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={end}"]
    agents = [
        subprocess.Popen(
            [*command, "--rdzv-id=two", "--max-restarts=5", str(script)],
            env=ENVIRONMENT | {"STARTS": str(tmp_path / name)},
        )
        for name in "ab"
    ]
    try:
        assert [agent.wait(250) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [(tmp_path / name).read_text().split() for name in "ab"] == [["0", "0", "0"], ["0", "1", "2"]]


def uninterrupted(mesh, folder):
    return [loss for _, loss in restarted.train(mesh, restarted.LOSS, folder)]

"""Restarts under torchrun: no operator helps, and the losses are those of a run without faults."""

import os
import re
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


def uninterrupted(mesh, folder):
    return [loss for _, loss in restarted.train(mesh, restarted.LOSS, folder)]

"""Ranks that are killed at random times, in steps and in saves: the run goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import killed
from helpers.profile import NIGHTLY

import shardlib as sl

KILLS = 100 if NIGHTLY else 10


@pytest.mark.timeout(3600 if NIGHTLY else 300)
def test_a_run_goes_on_through_kills(tmp_path):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "helpers.killed", str(tmp_path), str(KILLS)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    errors = "\n".join(file.read_text() for file in sorted(tmp_path.glob(f"errors-{KILLS}-*")))
    assert reports[-1] == {"ended": [0, 0]}, errors
    where = [report["killed"] for report in reports if "killed" in report]
    print({each: where.count(each) for each in sorted(set(where))})
    assert len(where) >= KILLS // 2

    wanted = {}

    def uninterrupted(mesh):
        killed.train(mesh, tmp_path / f"alone-{mesh.size}", wanted.__setitem__)

    sl.simulate(uninterrupted, mesh={"data": killed.RANKS})
    files = sorted(tmp_path.glob("losses-*"))
    found = [line.split() for file in files for line in file.read_text().splitlines() if line.count(" ")]
    assert {int(step) for step, _ in found} == set(range(1, killed.STEPS + 1))
    assert all(wanted[int(step)].startswith(loss) for step, loss in found)
    # Nothing was trained twice that had been saved: a run goes on where the newest checkpoint stood.
    for attempt, report in enumerate(reports[:-1]):
        following = [file for file in files if file.name.startswith(f"losses-{attempt + 1}-")]
        first = [int(file.read_text().split()[0]) for file in following if file.read_text().strip()]
        newest = report.get("newest")
        assert all(step == (sl.checkpoint.step_of(newest) if newest else 0) + 1 for step in first)

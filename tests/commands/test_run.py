"""`shardlib run`: ranks are killed, start again in other numbers, and end as if nothing had happened."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import supervised

import shardlib as sl
from shardlib.commands import __main__ as cli


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the training; returns the exit code, its output, and what the supervisor said."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(ranks, faults, *options):
        words = ["run", "--ranks", ranks, *options, "-m", "helpers.supervised", str(tmp_path), json.dumps(faults)]
        code = cli.main(words)
        out, err = capfd.readouterr()
        said = [line.removeprefix("shardlib run: ") for line in err.splitlines() if line.startswith("shardlib run: ")]
        return code, out.splitlines(), said, err

    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses and the SHA-256 of the same training on one device."""
    losses = {}
    found = supervised.train(sl.make_mesh(), tmp_path_factory.mktemp("alone"), record=losses.__setitem__)
    return losses, found


def test_killed_in_a_step_on_fewer_ranks_taken_back_and_told_to_end(run, tmp_path, uninterrupted):
    """Four ranks, three, four; then SIGTERM to the supervisor, and one device goes on: the same bits at every step."""
    losses, wanted = uninterrupted
    code, out, said, err = run("3:4", [[0, 3, 6, signal.SIGKILL], [2, 1, 14, -signal.SIGTERM]])
    assert code == 143, err
    begun = int(said[1].split()[-1])
    taken = begun + 4
    patterns = [
        "rank 3 of 4 was killed by SIGKILL after step 5",
        f"3 ranks go on from step {begun}",
        rf"step {begun + 1} after \d+\.\d s",
        f"step {taken} is saved: 4 ranks start",
        f"4 ranks go on from step {taken}",
        rf"step {taken + 1} after \d+\.\d s",
    ]
    assert begun in (0, 4) and len(said) == len(patterns)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, said, strict=True)), said

    found = [line.split() for line in out]
    last = int(found[-1][0])
    # No step was trained twice but those whose checkpoint was not on the disk.
    assert [int(step) for step, _ in found] == [*range(1, 6), *range(begun + 1, last + 1)] and last == 14
    assert all(losses[int(step)] == loss for step, loss in found)
    assert sl.checkpoint.step_of(sl.checkpoint.latest(tmp_path)) == last
    assert supervised.train(sl.make_mesh(), tmp_path) == wanted


def test_a_bug_ends_the_run_with_its_traceback(run):
    """Each time at the same step, on fewer ranks too."""
    faults = [[attempt, 0, 6, "a bug of the script"] for attempt in range(5)]
    code, _, said, err = run("1:2", faults)
    assert code == 1 and err.count("ValueError: a bug of the script") >= 3
    # Rank 1, which fails for want of rank 0, may be the first to end.
    said = [line.replace("rank 1 of 2", "rank 0 of 2") for line in said]
    assert [line for line in said if not re.match("step 5 after|1 rank goes on from step [04]", line)] == [
        "rank 0 of 2 exited with code 1 after step 5",
        "rank 0 of 1 exited with code 1 after step 5",
        "rank 0 of 1 exited with code 1 after step 5",
        "gives up: failed 3 times in a row at the same step",
    ]


def test_restarts_below_zero_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--ranks", "2", "--restarts", "-1", "script.py"])
    assert "-1 restarts; give 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("ranks, why", [("4:2", "a range ascends"), ("four", "is no number of ranks")])
def test_numbers_that_cannot_be_read(ranks, why, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--ranks", ranks, "script.py"])
    assert why in capsys.readouterr().err


def test_options_behind_the_script_are_the_scripts(tmp_path, capfd):
    """As with torchrun; where it looks like a mistake it is said."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    with pytest.raises(
        SystemExit, match=r"^shardlib run: on how many ranks\? Give --ranks, and before \S+script\.py, whose"
    ):
        cli.main(["run", str(script), "--ranks", "2"])
    with pytest.raises(SystemExit, match=r"Give --ranks: shardlib run --ranks 2 \S+script\.py$"):
        cli.main(["run", str(script)])
    assert cli.main(["run", "--ranks", "1", str(script), "--restarts=3"]) == 0
    out, err = capfd.readouterr()
    assert out == "['--restarts=3']\n" and f"--restarts=3 goes to {script}, since it stands behind it\n" in err


def test_a_script_that_is_not_there_is_not_tried():
    with pytest.raises(SystemExit, match=r"there is no nothing\.py; a module's name follows -m"):
        cli.main(["run", "--ranks", "2", "nothing.py"])

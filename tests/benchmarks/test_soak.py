"""A soak's table says what happened: one curve or not, where kills landed, how long recovery took, whether memory grew."""

import dataclasses
import sys

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.soak.report import Soak, per_minute

LINES = """rank 3 of 4 was killed by SIGKILL after step 7
3 ranks go on from step 5
step 6 after 4.0 s
step 10 is saved: 4 ranks start
4 ranks go on from step 10
step 11 after 3.0 s
rank 0 of 4 was killed by SIGKILL before its first step
rank 0 of 3 was killed by SIGKILL before its first step
1 rank goes on from step 10
step 11 after 6.0 s""".splitlines()
CURVE = [(step, f"loss {step}") for step in range(1, 12)]
KILLS = [("in a step", 1), ("as ranks started", 1), ("as ranks started", 2)]
SOAK = Soak(60.0, KILLS, LINES, [*CURVE, *CURVE[5:7]], CURVE, ("a", "a"))


def test_the_table():
    rows = dict(line.strip("| ").split(" | ") for line in SOAK.table().splitlines()[2:])
    assert rows["kills"] == "3, of 4 ranks"
    assert rows["which landed"] == "as ranks started 2, in a step 1"
    assert rows["starts that went on, by ranks"] == "1: 1, 3: 1, 4: 1"
    assert rows["recovery after a kill, to the first step done"] == "median 5.0 s, largest 6.0 s (of 2)"
    assert rows["the same when ranks are taken back"] == "median 3.0 s, largest 3.0 s (of 1)"
    assert rows["steps"] == "11, and 2 that were done again"
    assert "bit for bit" in rows["loss at every step, and SHA-256 of the last parameters"]


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [*CURVE, (6, "another")]},
        {"losses": CURVE[:-1]},
        {"losses": [*CURVE, (12, "loss 12")]},
        {"wanted": [*CURVE[:-1], (11, "another")]},
        {"sha256": ("a", "b")},
    ],
)
def test_another_curve_or_another_end_is_noticed(change):
    assert SOAK.one_curve
    other = dataclasses.replace(SOAK, **change)
    assert not other.one_curve and "NOT those of the uninterrupted run" in other.table()


def test_memory_is_measured_after_the_beginning():
    grows = [(second, 1_000_000 * second) for second in range(60)]
    flat = [(second, 60_000_000) for second in range(60, 200)]
    assert per_minute([*grows, *flat]) == pytest.approx(0)
    assert per_minute([(seconds, held + 50_000 * seconds) for seconds, held in flat]) == pytest.approx(3)
    assert per_minute(flat[:100]) is None


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_short_soak(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.soak.run._MEAN", 10.0)
    assert benchmarks.main(["soak", "--seconds", "60", "--out", str(tmp_path / "new")]) == 0, sys.stderr
    assert "bit for bit" in (tmp_path / "new" / "soak.md").read_text()

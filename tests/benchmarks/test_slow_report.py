"""The table of slow networks, against values computed by hand."""

import pytest

from benchmarks.network import report
from benchmarks.network.methods import ADAM, ONEBIT
from benchmarks.network.report import ALONE, RAW, Sample

MB = 1_000_000
# By rate: bytes per second of a raw transfer, compute, Adam's and 1-bit Adam's steps in two rounds.
MEASURED = {
    "100mbit": (10 * MB, (1.0, 1.0), (12.0, 14.0), (2.0, 2.0)),
    "unlimited": (1000 * MB, (1.0, 1.0), (1.0, 2.0), (1.2, 2.2)),
}


def samples():
    found = []
    for rate, (speed, compute, adam, onebit) in MEASURED.items():
        found.append(Sample(2, rate, RAW, 0, 0.5, speed / 2))
        for method, seconds, payload in ((ALONE, compute, 0), (ADAM, adam, 100 * MB), (ONEBIT, onebit, 5 * MB)):
            found += [Sample(2, rate, method, number, took, payload) for number, took in enumerate(seconds)]
    return found


def test_cells_and_targets():
    cells = report.evaluate(samples())
    slow = cells[2, "100mbit", ONEBIT]
    assert (slow.seconds, slow.serial, slow.payload) == (2.0, 1.5, 5 * MB)
    assert slow.over_serial.median == pytest.approx(2 / 1.5)
    assert slow.over_adam.median == pytest.approx((2 / 12 + 2 / 14) / 2)
    assert cells[2, "100mbit", ADAM].serial == 11.0
    targets = report.targets(cells)
    assert [(target.found, target.met) for target in targets] == [("6.46", True), ("1.333", False), ("1.150", True)]


def test_rows_and_samples():
    result = report.result(samples())
    rows = [line for line in result.text.splitlines() if line.startswith("| 2 |")]
    assert rows[1] == f"| 2 | {ONEBIT} | 5.00 | 2 | 1.5 | 6.46 | 1.7 | 1 | 0.87 |"
    assert [row.split(" | ")[1] for row in rows] == [ADAM, ONEBIT]
    assert [Sample(*sample) for sample in result.samples] == samples()

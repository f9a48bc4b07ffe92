"""Which cases `make test`, `make check` and `make nightly` run, by the time that they take.

`tests/durations.csv` has the seconds of a case of each test that takes longer than a tenth of one, as ``pytest --measure``
wrote them; a test that it does not name is taken for short. Cases that notice planted defects (docs/mutation.md) always run.

- `make test`: of tests whose cases are short, the first case; of each file one test at least, the shortest.
- `make check`: of each test, as many cases as fit in its seconds, evenly spaced.
- `make nightly`: all.
"""

from __future__ import annotations

import csv
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mutation.table import read

FILE = Path(__file__).parents[1] / "durations.csv"
SHORT = 0.1  # seconds: what is not written down
QUICK = 0.7  # a case that takes longer runs in `make check`
ONLY = 8.0  # but for the shortest of a file whose tests are all longer than that
EACH = 2.0  # of all the cases of a test that `make check` runs


def seconds() -> dict[str, float]:
    """Of a case of each test that is written down."""
    with FILE.open(newline="") as file:
        return {test: float(mean) for mean, test in csv.reader(file)}


def quick(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of the collected cases that `make test` runs."""
    took, noticing, chosen = seconds(), noticed(items), set()
    files = defaultdict(list)
    for name, cases in tests(items).items():
        length = took.get(name, SHORT)
        kept = noticing & set(cases)
        if not kept and length <= QUICK:
            kept = {cases[0]}
        chosen |= kept
        files[cases[0].path].append((bool(kept), length, cases[0]))
    for each in files.values():
        if not any(kept for kept, *_ in each):
            _, length, case = min(each, key=lambda one: one[1])
            if length <= ONLY:
                chosen.add(case)
    return chosen


def checked(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of the collected cases that `make test` and `make check` run."""
    took, chosen = seconds(), noticed(items)
    for name, cases in tests(items).items():
        count = min(len(cases), max(1, int(EACH / took.get(name, SHORT))))
        chosen |= {cases[len(cases) * number // count] for number in range(count)}
    return chosen


def noticed(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases that notice planted defects. Where the page names no case of a test, or one that is gone, all of the test's."""
    noticing = set(read().values())
    found = {item for item in items if item.nodeid in noticing}
    for name, cases in tests(items).items():
        if name in noticing and not found.intersection(cases):
            found |= set(cases)
    return found


def tests(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Cases by the name of their test."""
    found = defaultdict(list)
    for item in items:
        found[name_of(item.nodeid)].append(item)
    return found


def name_of(case: str) -> str:
    return case.partition("[")[0]


class SharedFixtures:
    """A plugin of each process: notes for each case what the fixtures of its file took that it uses. They are made once, by
    whichever case is the first."""

    def __init__(self) -> None:
        self._took: dict[tuple[str, str], float] = {}  # file and name

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Any:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "module":
                self._took[request.node.nodeid, fixturedef.argname] = time.perf_counter() - start

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        file, used = item.nodeid.partition("::")[0], getattr(item, "fixturenames", ())
        item.user_properties.append(("shared", sum(self._took.get((file, name), 0.0) for name in used)))


class Measured:
    """A plugin of the process that gathers reports: writes down what each test's cases took that ran and passed. A fixture of
    a file counts for each case that uses it."""

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            return
        cases = self.taken[name_of(report.nodeid)]
        if report.when == "call":  # what was set up may be what is shared
            cases[report.nodeid] = max(cases[report.nodeid], dict(report.user_properties).get("shared", 0.0))
        cases[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        means = seconds()
        for name, cases in self.taken.items():
            means[name] = sum(cases.values()) / len(cases)
        rows = [(f"{mean:.1f}", name) for name, mean in sorted(means.items()) if mean >= SHORT + 0.05]
        with FILE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

"""Runs cases one after the other, and writes the tables all of whose cases were measured in full."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import results, tables
from benchmarks.harness.case import CUDA, WRONG, Case, Result, Setting, Table


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case or of the checks; ``reasons`` why it is no full measurement are empty if it is one."""

    result: Result | None
    reasons: tuple[str, ...] = ()
    failed: bool = False


def chosen(known: Sequence[Table], names: Sequence[str]) -> list[Case]:
    """The cases with these names or in tables with these names; without names all.

    Raises:
        ValueError: a name is that of no case and no table.
    """
    cases = [case for table in known for case in table.cases]
    members = {case.name: {case.name} for case in cases}
    members |= {table.name: {case.name for case in table.cases} for table in known}
    if unknown := [name for name in names if name not in members]:
        raise ValueError(f"no case or table is called {', '.join(unknown)}: there are {', '.join(members)}")
    wanted = {case for name in names or members for case in members[name]}
    return [case for case in cases if case.name in wanted]


def run(
    known: Sequence[Table],
    names: Sequence[str],
    setting: Setting,
    source: Mapping[str, str],
    folder: Path = results.FOLDER,
) -> bool:
    """Measures cases, prints their results, and writes to ``folder`` the tables that were measured in full.

    On a GPU everything is checked before anything is measured.

    Args:
        known: all tables of this kind of device.
        names: of cases or tables, as `chosen` takes them.
        setting: of every case; with 0 rounds each has its own number.
        source: where the tables come from.

    Returns:
        Whether every case ran to its end, and every check held.
    """
    cases = chosen(known, names)
    checks = {"checks": _checked(cases, setting)} if setting.kind == CUDA else {}
    wanted, every = {case.name for case in cases}, list(checks.values())
    for table in known:
        if wanted.isdisjoint(case.name for case in table.cases):
            continue
        outcomes = checks | {
            case.name: _measured(case, setting) if case.name in wanted else Outcome(None, ("not measured",))
            for case in table.cases
        }
        _keep(table, outcomes, source, folder)
        every += outcomes.values()
    return not any(outcome.failed for outcome in every)


def _checked(cases: Sequence[Case], setting: Setting) -> Outcome:
    rows = []
    for case in cases:
        begun = time.monotonic()
        try:
            rows += case.check(setting.device) if case.check else []
        except Exception as error:
            traceback.print_exc()
            rows.append((case.name, f"{WRONG}: {error}"))
        print(f"{case.name}: checked in {time.monotonic() - begun:.0f} s", flush=True)
    result = tables.listed("Checks", "", ["check", "result"], rows, {})
    print(result.text, flush=True)
    wrong = tuple(f"{what}: {result}" for what, result in rows if result.startswith(WRONG))
    return Outcome(result, wrong, bool(wrong))


def _measured(case: Case, setting: Setting) -> Outcome:
    print(f"{case.name} …", flush=True)
    begun = time.monotonic()
    full = case.rounds[setting.kind]
    setting = replace(setting, rounds=setting.rounds or full)
    try:
        result = case.measure(setting)
    except Exception as error:
        traceback.print_exc()
        return Outcome(None, (f"failed: {error!r}",), True)
    print(result.text, f"{case.name}: measured in {time.monotonic() - begun:.0f} s", sep="\n", flush=True)
    reasons = ["at a small size"] * setting.small
    if setting.rounds < full:
        reasons.append(f"{setting.rounds} of {full} rounds")
    return Outcome(result, (*reasons, *(f"{what} is missing" for what in result.missing)))


def _keep(table: Table, outcomes: Mapping[str, Outcome], source: Mapping[str, str], folder: Path) -> None:
    """Writes a table, or prints why it is not written."""
    if reasons := [f"{name}: {reason}" for name, outcome in outcomes.items() for reason in outcome.reasons]:
        print(f"{table.name} is not written, as it was not measured in full:", *reasons, sep="\n  ", flush=True)
        return
    of_cases = [outcome.result for outcome in outcomes.values() if outcome.result is not None]
    print(f"written: {results.write(table, of_cases, source, folder)}", flush=True)

"""Results of cases as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.case import Result, Row
from benchmarks.harness.timing import Times, ratio

_HEADER = ("section", "what", "round", "seconds")
_VERDICTS = {True: "met", False: "missed", None: ""}


def grid(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table's lines."""
    head = f"|{'|'.join(f' {column} ' if column else ' ' for column in columns)}|"
    return [head, f"|{'---|' * len(columns)}", *(f"| {' | '.join(map(str, cells))} |" for cells in rows)]


def row(
    times: Times,
    name: str,
    reference: str,
    target: float | None = None,
    *,
    against: str = "",
    lowest: float | None = None,
) -> Row:
    """The comparison of ``name`` with ``reference``, which is printed as ``against``; not measured if one is missing."""
    if not {name, reference} <= times.keys():
        return Row(name, against or reference, target, None, None, lowest)
    return paired(name, times[name], against or reference, times[reference], target, lowest)


def paired(
    name: str, mine: list[float], reference: str, theirs: list[float], target: float | None, lowest: float | None = None
) -> Row:
    """The comparison of two lists of seconds, round by round."""
    seconds = statistics.median(mine), statistics.median(theirs)
    return Row(name, reference, target, ratio(mine, theirs), seconds, lowest)


def compared(
    title: str, about: str, rows: list[Row], times: Times, settings: Mapping[str, str] | None = None
) -> Result:
    """A table of ratios with their intervals and targets; ``settings``: provider -> its setting."""
    cells = []
    for one in rows:
        if one.ratio is None or one.seconds is None:
            cells.append([one.name, one.reference, "not measured", "", "", one.aim, ""])
            continue
        seconds = f"{one.seconds[0]:.4g} / {one.seconds[1]:.4g}"
        interval = f"{one.ratio.low:.3f} – {one.ratio.high:.3f}"
        verdict = _VERDICTS[one.met]
        cells.append([one.name, one.reference, seconds, f"{one.ratio.median:.3f}", interval, one.aim, verdict])
    lines = grid(["", "against", "seconds", "ratio", "95% interval", "target", ""], cells)
    if settings:
        lines += ["", *grid(["provider", "setting"], settings.items())]
    missing = [f"{one.name} against {one.reference}" for one in rows if one.ratio is None]
    return _part(title, about, lines, times, rows, missing)


def listed(title: str, about: str, columns: Sequence[str], cells: Iterable[Sequence[Any]], times: Times) -> Result:
    """A table with the columns that a case gives."""
    return _part(title, about, grid(columns, cells), times)


def section(title: str, about: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}", "", about, "", *lines]) + "\n"


def _part(
    title: str, about: str, lines: list[str], times: Times, rows: Sequence[Row] = (), missing: Sequence[str] = ()
) -> Result:
    samples = [(title, what, n, f"{t:.9f}") for what, seconds in times.items() for n, t in enumerate(seconds)]
    return Result(section(title, about, lines), _HEADER, samples, list(rows), list(missing))

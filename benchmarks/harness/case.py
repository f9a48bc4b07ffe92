"""Benchmarks: cases that are measured in a setting, and tables that their results are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness.timing import Calls, Ratio, Times, events, interleave, wall

CPU, CUDA = "cpu", "cuda"
Checks = list[tuple[str, str]]  # what was checked, and what came of it
WRONG = "WRONG"  # begins what came of a check that failed


@dataclass(frozen=True)
class Setting:
    """How a case is measured.

    Attributes:
        kind: "cpu" or "cuda": the kind of device whose rows are measured.
        device: the device that computes; with ``small`` it may be the CPU for "cuda" too.
        rounds: the number of rounds that are counted.
        small: whether sizes are tiny, only to see that the case runs.
        processes: how many runs train at once, in a case that trains many; None is one per core.
        work: the folder from which a case that trains many goes on, with what is finished there; None begins anew.
    """

    kind: str
    device: torch.device
    rounds: int
    small: bool = False
    processes: int | None = None
    work: Path | None = None

    def time(self, calls: Calls, *, warm: int = 1) -> Times:
        """Seconds of each call on the device; calls take turns."""
        return interleave(calls, self.rounds, warm=warm, stopwatch=events if self.device.type == CUDA else wall)


class Row(NamedTuple):
    """One comparison; ``ratio`` and ``seconds`` (of both sides) are None if it was not measured.

    ``target`` is the largest ratio aimed for, ``lowest`` the smallest, as a control must not be faster either.
    """

    name: str
    reference: str
    target: float | None
    ratio: Ratio | None
    seconds: tuple[float, float] | None
    lowest: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return (self.lowest or 0.0) <= self.ratio.median <= self.target

    @property
    def aim(self) -> str:
        if self.target is None:
            return ""
        return f"≤ {self.target:.2f}" if self.lowest is None else f"{self.lowest:.2f} – {self.target:.2f}"


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        text: Markdown.
        header: the names of the fields of ``samples``; the same for all cases of a table.
        samples: rows of the CSV file.
        rows: comparisons, for a plot.
        missing: names of what could not be measured here.
    """

    text: str
    header: tuple[str, ...]
    samples: list[tuple[Any, ...]]
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Case(NamedTuple):
    """One benchmark.

    Attributes:
        rounds: kind of device -> the number of rounds of a full measurement.
        check: makes checks for a device, which run before anything is measured on it.
    """

    name: str
    about: str
    rounds: Mapping[str, int]
    measure: Callable[[Setting], Result]
    check: Callable[[torch.device], Checks] | None = None


class Table(NamedTuple):
    """The results of some cases, in order, as ``results/name.md``, ``.csv`` and, with a ``plot``, ``.png``."""

    name: str
    title: str
    cases: tuple[Case, ...]
    plot: Callable[[Path, list[Result]], None] | None = None

"""What a benchmark is: a case that takes a setting, and the tables that cases are written to."""

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
        kind: "cpu" or "cuda", whose rows are measured.
        device: what computes; with ``small`` it may be the CPU for "cuda" too.
        rounds: rounds that count.
        small: sizes that mean nothing, to see that the case runs.
        processes: how many runs are trained side by side, where a case trains many; None is one a core.
    """

    kind: str
    device: torch.device
    rounds: int
    small: bool = False
    processes: int | None = None

    def time(self, calls: Calls, *, warm: int = 1) -> Times:
        """Seconds of each on the device, taking turns."""
        return interleave(calls, self.rounds, warm=warm, stopwatch=events if self.device.type == CUDA else wall)


class Row(NamedTuple):
    """One comparison; ``ratio`` and ``seconds`` (of both) are None where it was not measured.

    ``target`` is the largest ratio aimed for, ``lowest`` the smallest: a control must not come out faster either.
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
class Part:
    """What a case found.

    Attributes:
        text: Markdown.
        header: what each of ``samples`` is made of; the same for all cases of a table.
        samples: rows of the CSV file.
        rows: what is compared, for a plot.
        missing: what could not be measured here.
    """

    text: str
    header: tuple[str, ...]
    samples: list[tuple[Any, ...]]
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Case(NamedTuple):
    """One benchmark.

    Attributes:
        rounds: kind of device -> how many rounds a full measurement has.
        check: on a device, before anything is measured on it.
    """

    name: str
    about: str
    rounds: Mapping[str, int]
    measure: Callable[[Setting], Part]
    check: Callable[[torch.device], Checks] | None = None


class Table(NamedTuple):
    """``results/name.md`` and ``.csv`` (and ``.png``, where there is a ``plot``): what its cases found, in their order."""

    name: str
    title: str
    cases: tuple[Case, ...]
    plot: Callable[[Path, list[Part]], None] | None = None

"""What a soak has shown, as a table."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_WARM = 60.0  # seconds of a process's life that are left out: until then its allocators fill


@dataclass
class Soak:
    """A soak's facts.

    Attributes:
        seconds: how long ranks were killed.
        kills: what the ranks did at each kill, and how many were killed.
        lines: what the supervisor said.
        losses, wanted: steps and losses of the run, and of the uninterrupted one.
        sha256: of the parameters, of both.
        rank_memory, supervisor_memory: seconds and resident bytes of each rank, and of the supervisor.
    """

    seconds: float
    kills: list[tuple[str, int]]
    lines: list[str]
    losses: list[tuple[int, str]]
    wanted: list[tuple[int, str]]
    sha256: tuple[str, str]
    rank_memory: list[list[tuple[float, int]]] = field(default_factory=list)
    supervisor_memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def one_curve(self) -> bool:
        """Whether every step, however often it was done, has the uninterrupted run's loss, and the end its parameters."""
        wanted = dict(self.wanted)
        same = all(wanted.get(step) == loss for step, loss in self.losses)
        return same and {step for step, _ in self.losses} == set(wanted) and len(set(self.sha256)) == 1

    def table(self) -> str:
        """The facts as Markdown."""
        after_kills, after_returns = _recoveries(self.lines)
        where = Counter(what for what, _ in self.kills)
        sizes = Counter(int(found[1]) for line in self.lines if (found := re.match(r"(\d+) ranks? go", line)))
        steps = {step for step, _ in self.losses}
        lives = [slope for life in self.rank_memory if (slope := per_minute(life)) is not None]
        whole = per_minute(self.supervisor_memory)
        rows = [
            ("ranks were killed for", f"{self.seconds:.0f} s"),
            ("kills", f"{len(self.kills)}, of {sum(ranks for _, ranks in self.kills)} ranks"),
            ("which landed", ", ".join(f"{what} {count}" for what, count in sorted(where.items())) or "nowhere"),
            (
                "starts that went on, by ranks",
                ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items())) or "none",
            ),
            ("recovery after a kill, to the first step done", _spread(after_kills)),
            ("the same when ranks are taken back", _spread(after_returns)),
            ("steps", f"{len(steps)}, and {len(self.losses) - len(steps)} that were done again"),
            ("loss at every step, and SHA-256 of the last parameters", self._verdict()),
            ("a rank's memory, MB a minute over its life", _spread(lives, "", 2)),
            ("the supervisor's", "not measured" if whole is None else f"{whole:.3f} MB a minute over the whole"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), ""])

    def _verdict(self) -> str:
        return "those of the uninterrupted run, bit for bit" if self.one_curve else "NOT those of the uninterrupted run"


def per_minute(samples: Sequence[tuple[float, int]]) -> float | None:
    """The least-squares slope of resident memory in MB a minute, after the process has warmed up; None for a short life."""
    warm = [(seconds, held) for seconds, held in samples if seconds > samples[0][0] + _WARM]
    if not warm or warm[-1][0] - warm[0][0] < _WARM:
        return None
    seconds, held = np.array(warm).T
    return float(np.polyfit(seconds / 60, held / 1e6, 1)[0])


def _recoveries(lines: Sequence[str]) -> tuple[list[float], list[float]]:
    """Seconds from each failure, and from each return of ranks, to the first step that was done."""
    found: tuple[list[float], list[float]] = [], []
    returned = False
    for line in lines:
        if recovered := re.fullmatch(r"step \d+ after ([\d.]+) s", line):
            found[returned].append(float(recovered[1]))
        elif not re.match(r"\d+ ranks? go", line):
            returned = line.endswith("ranks start")
    return found


def _spread(values: Sequence[float], unit: str = " s", digits: int = 1) -> str:
    if not values:
        return "not measured"
    middle, largest = statistics.median(values), max(values)
    return f"median {middle:.{digits}f}{unit}, largest {largest:.{digits}f}{unit} (of {len(values)})"

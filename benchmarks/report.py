"""Results as Markdown, CSV and a plot."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Ratio, Times

_COLOURS = {True: "#3b8a5a", False: "#c8553d", None: "#8a8a8a"}


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


@dataclass
class Section:
    """One benchmark's results; ``settings``: provider -> how it is set."""

    title: str
    text: str
    rows: list[Row]
    settings: dict[str, str] = field(default_factory=dict)
    times: Times = field(default_factory=dict)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, ""]
        lines += ["| | against | seconds | ratio | 95% interval | target | |", "|---|---|---|---|---|---|---|"]
        for row in self.rows:
            if row.ratio is None or row.seconds is None:
                lines.append(f"| {row.name} | {row.reference} | not measured | | | {row.aim} | |")
                continue
            seconds = f"{row.seconds[0]:.4g} / {row.seconds[1]:.4g}"
            interval = f"{row.ratio.low:.3f} – {row.ratio.high:.3f}"
            verdict = {True: "met", False: "missed", None: ""}[row.met]
            cells = [row.name, row.reference, seconds, f"{row.ratio.median:.3f}", interval, row.aim, verdict]
            lines.append(f"| {' | '.join(cells)} |")
        if self.settings:
            lines += ["", "| provider | setting |", "|---|---|"]
            lines += [f"| {name} | {setting} |" for name, setting in self.settings.items()]
        return "\n".join(lines) + "\n"


def results(name: str) -> Path:
    """Where the results of that file name are."""
    return Path(__file__).parent / "results" / name


def write_rows(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A CSV file."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(rows)


def write(name: str, sections: list[Section]) -> None:
    """``results/name.md``, ``.csv`` and, where matplotlib is installed, ``.png``."""
    text = "\n".join([f"# Measured by `make bench`\n\n{machine()}\n", *(section.markdown() for section in sections)])
    results(f"{name}.md").write_text(text)
    timed = ((section.title, what, times) for section in sections for what, times in section.times.items())
    rows = ((title, what, number, f"{t:.6f}") for title, what, times in timed for number, t in enumerate(times))
    write_rows(results(f"{name}.csv"), ["section", "what", "round", "seconds"], rows)
    try:
        _plot(results(f"{name}.png"), [row for section in sections for row in section.rows if row.ratio])
    except ImportError:
        print("no plot: matplotlib is not installed")


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        cores = sum(line.startswith("processor") for line in lines)
    except (OSError, StopIteration):
        cores = 0
    return f"{cpu}, {cores or '?'} cores; torch {torch.__version__}, Python {platform.python_version()}."


def _plot(path: Path, rows: list[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.42 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(reversed(rows)):
        assert row.ratio is not None
        errors = [[row.ratio.median - row.ratio.low], [row.ratio.high - row.ratio.median]]
        axes.errorbar(row.ratio.median, place, xerr=errors, fmt="o", color=_COLOURS[row.met], capsize=3)
        if row.target is not None:
            axes.plot([row.target] * 2, [place - 0.35, place + 0.35], color="#333333", linewidth=1.5)
    axes.axvline(1, color="#cccccc", zorder=0)
    axes.set_yticks(range(len(rows)), [f"{row.name} / {row.reference}" for row in reversed(rows)], fontsize=8)
    axes.set(xlabel="ratio of times: median, 95% interval; bars are targets", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)

"""Plots of ratios with their intervals and targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Result

_COLOURS = {True: "#3b8a5a", False: "#c8553d", None: "#8a8a8a"}


def figure(width: float, height: float) -> Any:
    """A figure without a window.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    return made


def draw(plot: Callable[[Path, list[Result]], None], path: Path, results: list[Result]) -> None:
    """Calls ``plot`` if matplotlib is installed."""
    try:
        plot(path, results)
    except ImportError:
        print("no plot: matplotlib is not installed")


def ratios(path: Path, results: list[Result]) -> None:
    """Draws every comparison of the results."""
    rows = [row for result in results for row in result.rows if row.ratio]
    made = figure(8, 0.6 + 0.42 * len(rows))
    axes = made.add_subplot()
    for index, row in enumerate(reversed(rows)):
        assert row.ratio is not None
        errors = [[row.ratio.median - row.ratio.low], [row.ratio.high - row.ratio.median]]
        axes.errorbar(row.ratio.median, index, xerr=errors, fmt="o", color=_COLOURS[row.met], capsize=3)
        if row.target is not None:
            axes.plot([row.target] * 2, [index - 0.35, index + 0.35], color="#333333", linewidth=1.5)
    axes.axvline(1, color="#cccccc", zorder=0)
    axes.set_yticks(range(len(rows)), [f"{row.name} / {row.reference}" for row in reversed(rows)], fontsize=8)
    axes.set(xlabel="ratio of times: median, 95% interval\nbars are targets", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    made.savefig(path)

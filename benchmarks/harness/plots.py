"""Ratios with their intervals and targets, drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Part

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


def draw(plot: Callable[[Path, list[Part]], None], path: Path, parts: list[Part]) -> None:
    """``plot``, where matplotlib is installed."""
    try:
        plot(path, parts)
    except ImportError:
        print("no plot: matplotlib is not installed")


def ratios(path: Path, parts: list[Part]) -> None:
    """Every comparison of the parts."""
    rows = [row for part in parts for row in part.rows if row.ratio]
    made = figure(8, 0.6 + 0.42 * len(rows))
    axes = made.add_subplot()
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
    made.savefig(path)

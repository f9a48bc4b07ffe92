"""One page of HTML for a run: what it reached, its curves, plan against measured, the timeline of a step, what it cost."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch

from shardlib.common.display.braille import curve_text
from shardlib.common.display.colours import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from shardlib.common.display.panels import STYLE, Fold, Grid, Panel, Paragraph, Picture, Shown, Title
from shardlib.common.display.svg import Curve, Format, line_chart, short_number
from shardlib.plan.plan import Plan
from shardlib.plan.tables import size
from shardlib.report.environment import devices, versions
from shardlib.report.range_test import running_mean

_MORE = 24  # further curves that are drawn
_PAGE = (
    "body{color-scheme:light dark;background:Canvas;color:CanvasText;margin:1.5em auto;max-width:60em;padding:0 1em}"
)


class _Chart(NamedTuple):
    """How a metric is drawn: its title, the name of its axis with the unit, its colour, and its numbers as text."""

    title: str
    axis: str
    colour: str
    text: Format = short_number


def _bytes(number: float) -> str:
    return size(round(number))


_CHARTS = {
    "lr": _Chart("Learning rate", "learning rate", GREEN),
    "tokens_per_second": _Chart("Tokens per second, all ranks", "tokens/s", BLUE),
    "mfu": _Chart("Model FLOPs utilisation", "share of the peak", PURPLE, lambda share: f"{share:.1%}"),
    "memory": _Chart("Memory of rank 0", "bytes held", ORANGE, _bytes),
    "grad_norm": _Chart("Gradient norm before clipping", "l2 norm", SKY),
}
_NOT_DRAWN = ("finite",)


class HtmlWriter:
    """A writer for `Log` of one HTML page, which needs no other file, no network and no scripts: open it in any browser.

    It has what the run reached, curves of all metrics, planned against measured numbers, further values (a profile, say),
    what the run cost, the plan, and the versions and devices. The page is written every ``every`` seconds and when the log
    closes; `add` and `compare` work after that too, if `close` is called again.

    Args:
        path: the file; missing folders are created.
        title: of the page.
        tokens_per_step: over all ranks, for the cost.
        plan: the run's plan.
        ranks: how many there are, for the cost.
        price: of one rank for an hour, in any currency. Without it the page names no money.
        levels: name -> a loss that is drawn as a line, to compare with.
        unit: of the loss, such as "nats per token".
        unknown: name -> why a value is not known: `StepRates.unknown`.
        earlier: name -> (step, value) pairs of an interrupted run that this one goes on from.

    >>> writer = sl.report.HtmlWriter("run.html", title="A run", tokens_per_step=1024)
    >>> with sl.report.Log(writer) as log:
    ...     for step in range(1, 4):
    ...         log.write(step, {"loss": 1 / step})
    >>> writer.add("Schedule", sl.schedules.one_f_one_b(2, 4))
    >>> writer.close()
    >>> "<title>A run</title>" in open("run.html").read()
    True
    """

    def __init__(
        self,
        path: str | Path,
        *,
        title: str = "A run",
        tokens_per_step: int | None = None,
        plan: Plan | None = None,
        ranks: int = 1,
        price: float | None = None,
        levels: Mapping[str, float] | None = None,
        unit: str = "loss",
        unknown: Mapping[str, str] | None = None,
        earlier: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        every: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if price is not None and not 0 <= price < math.inf:
            raise ValueError(
                f"HtmlWriter(price={price!r}): a price is a number from 0. Leave it out if it is not known"
            )
        self._path, self._title, self._tokens, self._plan = Path(path), title, tokens_per_step, plan
        self._ranks, self._price, self._levels, self._unit = ranks, price, dict(levels or {}), unit
        self._unknown = unknown if unknown is not None else {}
        self._curves = {name: list(points) for name, points in (earlier or {}).items()}
        self._every, self._clock = every, clock
        self._began = self._last = self._written = clock()
        self._steps = 0
        self._sections: dict[str, list[Panel]] = {}
        self._compared: list[tuple[str, str, str]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._last = self._clock()
        self._steps += "loss" in values
        for name, value in values.items():
            self._curves.setdefault(name, []).append((step, value))
        if self._last - self._written >= self._every:
            self.close()

    def compare(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Adds rows of what, planned and measured, in words."""
        self._compared += rows

    def add(self, title: str, value: Shown) -> None:
        """Adds a section with what a value shows: a profile, a timeline, a plan, a layout."""
        self._sections[title] = list(value.shown())

    def close(self) -> None:
        """Writes the page."""
        self._written = self._clock()
        parts = "".join(
            f"<section><h2>{escape(title)}</h2>{''.join(panel.html() for panel in panels)}</section>"
            for title, panels in self._content().items()
            if panels
        )
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self._title)}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<style>{_PAGE}{STYLE}</style></head><body>"
            f'<main class="sl-view"><h1>{escape(self._title)}</h1>{parts}</main></body></html>'
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, self._path)  # whoever reads it has a whole page

    def _content(self) -> dict[str, list[Panel]]:
        """Title -> what stands there."""
        compared = [Grid(("", "planned", "measured"), self._compared, 2)] if self._compared else []
        return {
            "What it reached": self._reached(),
            "Curves": self._drawn(),
            "Plan against measured": list(compared),
            **self._sections,
            "What it cost": self._cost(),
            "Plan": [] if self._plan is None else list(self._plan.shown()),
            "Environment": self._environment(),
        }

    def _reached(self) -> list[Panel]:
        loss, validation = self._curves.get("loss", []), self._curves.get("validation/loss", [])
        rows = []
        if loss:
            rows += [("steps", f"{loss[-1][0]:,}"), ("last loss", f"{loss[-1][1]:.4f} {self._unit}")]
        if validation:
            rows.append(
                ("last validation loss", f"{validation[-1][1]:.4f} {self._unit}, at step {validation[-1][0]:,}")
            )
        for name, chart in _CHARTS.items():
            if points := self._curves.get(name):
                rows.append((chart.title, chart.text(points[-1][1])))
            elif name in self._unknown:
                rows.append((chart.title, f"unknown: {self._unknown[name]}"))
        return [Grid(("", "at the end"), rows)]

    def _drawn(self) -> list[Panel]:
        panels: list[Panel] = []
        loss, validation = self._curves.get("loss", []), self._curves.get("validation/loss", [])
        if loss:
            finite = [point for point in loss if math.isfinite(point[1])]
            smooth = running_mean([value for _, value in finite], 1 / 50).tolist() if finite else []
            curves = [
                Curve("loss", loss, BLUE, faint=True),
                Curve("training", [(step, value) for (step, _), value in zip(finite, smooth)], BLUE),
                Curve("validation", validation, VERMILLION, dots=True),
            ]
            svg = line_chart(curves, ("step", self._unit), "Loss by step", levels=self._levels, height=280)
            legend = {"training (running mean)": BLUE} | ({"validation": VERMILLION} if validation else {})
            panels += [Title("Loss"), Picture(svg, "\n".join(curve_text(loss)), legend)]
        for name, chart in _CHARTS.items():
            if points := self._curves.get(name):
                panels += [Title(chart.title), self._chart(chart, points)]
        others = [name for name in self._curves if name not in ("loss", "validation/loss", *_CHARTS, *_NOT_DRAWN)]
        further: list[Panel] = []
        for name in others[:_MORE]:
            further += [Title(name), self._chart(_Chart(name, name, BLUE), self._curves[name])]
        if len(others) > _MORE:
            further.append(Paragraph(f"… and {len(others) - _MORE} more"))
        return [*panels, *([Fold(f"Further metrics ({len(others)})", further)] if others else [])]

    def _chart(self, chart: _Chart, points: Sequence[tuple[int, float]]) -> Picture:
        curve = Curve(chart.title, points, chart.colour)
        svg = line_chart([curve], ("step", chart.axis), f"{chart.title} by step", y_format=chart.text, height=180)
        return Picture(svg, "\n".join(curve_text(points)), {})

    def _cost(self) -> list[Panel]:
        seconds = max(self._last - self._began, 0.0)
        hours = seconds / 3600 * self._ranks
        rows = [("time", _duration(seconds)), ("ranks", f"{self._ranks:,}"), ("rank hours", f"{hours:.4g}")]
        if self._tokens is not None:
            rows.append(("tokens", f"{self._steps * self._tokens:,}"))
        if self._price is not None:
            rows.append(("price", f"{hours * self._price:.4g}, at {self._price:g} for a rank's hour"))
        notes = [] if self._price is not None else [Paragraph("No price was given, so money is not counted.")]
        return [Grid(("this run", ""), rows), *notes]

    def _environment(self) -> list[Panel]:
        present = [row for row in versions() if row[1] != "not installed"]
        began = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self._began))
        rows = [("began", began), ("command", " ".join(map(str, sys.argv))), ("threads", str(torch.get_num_threads()))]
        return [Grid(("package", "version"), present), Grid(("device", ""), devices()), Grid(("run", ""), rows)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"

"""A live view of a run in a terminal: the curve of its loss, its rates and memory, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardlib.common.display.braille import curve_text
from shardlib.common.display.colours import BLUE
from shardlib.common.thresholds import Threshold
from shardlib.plan.tables import size
from shardlib.report.progress import Progress

_EVERY = 0.25  # seconds between two drawings
_POINTS = Threshold(2000)  # of the curve that are kept; of more, every other one


class Watch(Progress):
    """A writer for `Log` like `Progress` that fills part of a terminal: the loss so far as a curve, beside it the learning
    rate, tokens per second, model FLOPs utilisation and memory (see `sl.report.StepRates`), and the last validation.

    Elsewhere than in a terminal it prints the lines of `Progress`, with these values.

    Args:
        unknown: name -> why a value is not known, as `StepRates.unknown`.
    """

    def __init__(self, *args: Any, unknown: Mapping[str, str] | None = None, **options: Any) -> None:
        self._points: list[tuple[float, float]] = []
        self._values: dict[str, float] = {}
        self._unknown = unknown if unknown is not None else {}
        super().__init__(*args, **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values
        if "loss" in values:
            self._points.append((step, values["loss"]))
            if len(self._points) > _POINTS():
                self._points = [*self._points[:-1:2], self._points[-1]]
        super().write(step, values)

    def _opened(self, console: Console, start: int) -> Live:
        live, drawn = Live(self._view(start), console=console, auto_refresh=False), self._clock()

        def redraw(step: int) -> None:
            nonlocal drawn
            if (now := self._clock()) - drawn >= _EVERY or step == self._steps:
                drawn = now
                live.update(self._view(step), refresh=True)

        self._redraw = redraw
        return live

    def _view(self, step: int) -> RenderableType:
        curve = Text("\n".join(curve_text(self._points, 48, 8)), style=BLUE, no_wrap=True)
        rows = Table.grid(padding=(0, 2))
        for name, text in self.facts().items():
            rows.add_row(Text(name, "dim"), Text(text))
        both = Table.grid(padding=(0, 3))
        both.add_row(Group(Text("loss by step", "bold"), curve), rows)
        return Panel(Group(both, Text(super()._line(step))), title="shardlib", title_align="left", expand=False)

    def facts(self) -> dict[str, str]:
        """What is shown beside the curve, in words; of what is not known, why."""
        shown = {
            "lr": ("learning rate", lambda value: f"{value:.3g}"),
            "tokens_per_second": ("tokens per second", lambda value: f"{value:,.0f}"),
            "mfu": ("model FLOPs utilisation", lambda value: f"{value:.1%}"),
            "memory": ("memory of this rank", lambda value: size(round(value))),
            "grad_norm": ("gradient norm", lambda value: f"{value:.3g}"),
            "validation/loss": ("validation loss", lambda value: f"{value:.4f}"),
        }
        found = {}
        for name, (title, text) in shown.items():
            if name in self._values:
                found[title] = text(self._values[name])
            elif name in self._unknown:
                found[title] = f"unknown: {self._unknown[name]}"
        return found

    def _line(self, step: int) -> str:
        values = self._values
        more = [f"lr {values['lr']:.3g}"] if "lr" in values else []
        more += [f"mfu {values['mfu']:.1%}"] if "mfu" in values else []
        more += [f"memory {size(round(values['memory']))}"] if "memory" in values else []
        return "  ".join([super()._line(step), *more])

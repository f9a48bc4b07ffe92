"""Timelines of schedules, as text for a terminal and as a drawing: a row for each rank, a box for each action."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardlib.common.display.colours import KINDS, mixed
from shardlib.common.display.panels import Picture
from shardlib.common.display.svg import SpanChart, TimeSpan
from shardlib.schedules.events import Action, Event, Kind

NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
PALE = 0.55  # the share of white in the colour of a rank's first stage; its last stage has the full colour
_RANKS = 64  # that are drawn

Events = Sequence[Sequence[Event]]


def rows_text(events: Events, staged: bool, width: int = 120) -> list[str]:
    """A line for each rank, at most ``width`` characters wide after the rank's name.

    An action is its name followed by ``-``; idle time is ``.``. If names do not fit, the stage is left out (``4F0`` becomes
    ``F0``; without ``staged`` it always is), then the micro-batch, and the letter is repeated. Actions that take no time are
    not shown.
    """
    spellings: list[Callable[[Action], str]] = [lambda action: f"{action.kind}{action.microbatch}"]
    if staged:
        spellings.insert(0, str)
    lasting = [event for of_rank in events for event in of_rank if event.end > event.start]
    makespan = max(of_rank[-1].end for of_rank in events if of_rank)
    for spell in spellings:
        # The least number of characters per unit of time at which every name fits.
        scale = max(len(spell(action)) / (end - start) for action, start, end in lasting)
        if scale * makespan <= width:
            break
    else:
        scale, spell = width / makespan, _letter
    lines = []
    margin = len(f"r{len(events) - 1}")
    for rank, of_rank in enumerate(events):
        line = ""
        for action, start, end in of_rank:
            line = line.ljust(_column(start, scale), ".")
            room = _column(end, scale) - len(line)
            line += spell(action)[:room].ljust(room, _letter(action) if spell is _letter else "-")
        lines.append(f"{f'r{rank}':<{margin}} {line.ljust(_column(makespan, scale), '.')}")
    return lines


def picture(title: str, events: Events, staged: bool, unit: str) -> Picture:
    """The drawing. A box shows its micro-batch, and the rest at the mouse; with ``staged`` later stages are darker."""
    shown = events[:_RANKS]
    left_out = len(events) - len(shown)
    chart = SpanChart(title, f"time, {unit}" + (f"; {left_out} ranks left out" if left_out else ""))
    for rank, of_rank in enumerate(shown):
        stages = sorted({event.action.stage for event in of_rank})
        spans = []
        for (stage, kind, microbatch), start, end in of_rank:
            pale = PALE * (1 - stages.index(stage) / (len(stages) - 1)) if staged and len(stages) > 1 else 0.0
            what = f"{NAMES[kind]} of micro-batch {microbatch} in stage {stage}"
            hint = f"rank {rank}: {what}, {float(start):g} to {float(end):g}"
            spans.append(TimeSpan(float(start), float(end), mixed(KINDS[kind], pale), str(microbatch), hint))
        chart.rows.append((f"rank {rank}", spans))
    kinds = {event.action.kind for of_rank in events for event in of_rank}
    legend = {NAMES[kind]: KINDS[kind] for kind in NAMES if kind in kinds}
    return Picture(chart.svg(), "\n".join(rows_text(events, staged, 74)), legend)


def _letter(action: Action) -> str:
    return str(action.kind)


def _column(time: float, scale: float) -> int:
    """The column of a time, rounded half up; with `round`, which rounds to even, equal boxes would differ in width."""
    return math.floor(time * scale + 0.5)

"""Timelines of schedules, as a picture or as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlib.common.optional import new_figure, save_figure
from shardlib.schedules import Action, Kind, Timeline

_COLOURS = {Kind.F: "#3b6ea8", Kind.B: "#c8553d", Kind.I: "#d9902f", Kind.W: "#4f8a55"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_PALE = 0.55  # the share of white in the colour of a rank's first stage; its last stage has the full colour


def draw_timeline(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Writes a PNG with one row per rank and one box per action; several timelines are stacked over one time axis.

    A box shows the number of its micro-batch. Its colour is that of the kind of action, darker for a rank's later stages.
    Missing folders are created.

    Raises:
        MissingPackage: matplotlib is not installed; the message says what to install.
        ValueError: there are no timelines.
    """
    stacked = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not stacked:
        raise ValueError("no timelines to draw; give at least one")
    longest = float(max(timeline.makespan for timeline in stacked))
    rows = [timeline.schedule.ranks for timeline in stacked]
    width, row = 10.0, 0.32
    figure = new_figure(width, row * sum(rows) + 0.75 * len(stacked) + 0.6)
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    panels = figure.subplots(len(stacked), sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    shown: dict[Kind, Patch] = {}
    for axes, timeline in zip(panels, stacked):
        schedule = timeline.schedule
        for rank, events in enumerate(timeline.events):
            stages = schedule.stages_of(rank)
            for (stage, kind, microbatch), start, end in events:
                pale = _PALE * (1 - stages.index(stage) / max(len(stages) - 1, 1))
                fill = tuple(channel + (1 - channel) * pale for channel in to_rgb(_COLOURS[kind]))
                left, wide = float(start), float(end - start)
                axes.barh(rank, wide, left=left, height=1, color=fill, edgecolor="white", linewidth=0.6)
                if wide / longest * (width - 1) > 0.07 * len(str(microbatch)):  # room for digits of 0.07 inches
                    ink = "#1c1c1c" if pale > _PALE / 2 else "white"
                    at = (left + wide / 2, rank)
                    axes.text(*at, microbatch, color=ink, ha="center", va="center_baseline", fontsize=6.5)
                shown.setdefault(kind, Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]))
        axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)], fontsize=9)
        axes.set_ylim(schedule.ranks - 0.5, -0.5)
        axes.set_xlim(0, longest)
        axes.set_facecolor("#f3f3f3")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(_title(timeline), fontsize=9, loc="left")
    panels[-1].set_xlabel("time", fontsize=9)
    panels[-1].tick_params(axis="x", labelsize=9)
    handles = [shown[kind] for kind in _NAMES if kind in shown]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
    save_figure(figure, path)


def timeline_text(timeline: Timeline, width: int = 120) -> str:
    """The timeline as text, one line per rank, at most ``width`` characters wide after the rank's name.

    An action is its name followed by ``-``; idle time is ``.``. If names do not fit, the stage is left out (``4F0`` becomes
    ``F0``; with one stage per rank it always is), then the micro-batch, and the letter is repeated. Actions that take no
    time are not shown.
    """
    spellings: list[Callable[[Action], str]] = [lambda action: f"{action.kind}{action.microbatch}"]
    if timeline.schedule.stages > timeline.schedule.ranks:
        spellings.insert(0, str)
    lasting = [event for events in timeline.events for event in events if event.end > event.start]
    for spell in spellings:
        # The least number of characters per unit of time at which every name fits.
        scale = max(len(spell(action)) / (end - start) for action, start, end in lasting)
        if scale * timeline.makespan <= width:
            break
    else:
        scale, spell = width / timeline.makespan, _letter
    lines = [_title(timeline)]
    margin = len(f"r{timeline.schedule.ranks - 1}")
    for rank, events in enumerate(timeline.events):
        line = ""
        for action, start, end in events:
            line = line.ljust(_column(start, scale), ".")
            room = _column(end, scale) - len(line)
            line += spell(action)[:room].ljust(room, _letter(action) if spell is _letter else "-")
        lines.append(f"{f'r{rank}':<{margin}} {line.ljust(_column(timeline.makespan, scale), '.')}")
    return "\n".join(lines)


def _letter(action: Action) -> str:
    return str(action.kind)


def _column(time: float, scale: float) -> int:
    """The column of a time, rounded half up; with `round`, which rounds to even, equal boxes would differ in width."""
    return math.floor(time * scale + 0.5)


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    peak = max(timeline.peak_in_flight)
    held = f"{peak} micro-batches" if schedule.stages == schedule.ranks else f"{peak} chunk activations"
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches; "
        f"makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.1%}, at most {held} held"
    )

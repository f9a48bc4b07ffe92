"""Timelines of schedules, as a picture or as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardlib.common.display.colours import KINDS
from shardlib.common.optional import new_figure, save_figure
from shardlib.schedules import Kind, Timeline
from shardlib.schedules.picture import NAMES, PALE, rows_text


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
                pale = PALE * (1 - stages.index(stage) / max(len(stages) - 1, 1))
                fill = tuple(channel + (1 - channel) * pale for channel in to_rgb(KINDS[kind]))
                left, wide = float(start), float(end - start)
                axes.barh(rank, wide, left=left, height=1, color=fill, edgecolor="white", linewidth=0.6)
                if wide / longest * (width - 1) > 0.07 * len(str(microbatch)):  # room for digits of 0.07 inches
                    ink = "#1c1c1c" if pale > PALE / 2 else "white"
                    at = (left + wide / 2, rank)
                    axes.text(*at, microbatch, color=ink, ha="center", va="center_baseline", fontsize=6.5)
                shown.setdefault(kind, Patch(facecolor=KINDS[kind], label=NAMES[kind]))
        axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)], fontsize=9)
        axes.set_ylim(schedule.ranks - 0.5, -0.5)
        axes.set_xlim(0, longest)
        axes.set_facecolor("#f3f3f3")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(timeline.summary, fontsize=9, loc="left")
    panels[-1].set_xlabel("time", fontsize=9)
    panels[-1].tick_params(axis="x", labelsize=9)
    handles = [shown[kind] for kind in NAMES if kind in shown]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
    save_figure(figure, path)


def timeline_text(timeline: Timeline, width: int = 120) -> str:
    """The timeline as text, one line per rank, at most ``width`` characters wide after the rank's name: see `rows_text`."""
    staged = timeline.schedule.stages > timeline.schedule.ranks
    return "\n".join([timeline.summary, *rows_text(timeline.events, staged, width)])

"""Recorded steps to look at: pictures of what ran when and how long it took, and Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.common.display.colours import BLUE, PHASES
from shardlib.common.display.panels import Picture
from shardlib.common.display.svg import SpanChart, TimeSpan, bar_chart
from shardlib.common.optional import new_figure, save_figure
from shardlib.report.profile.recording import RecordedStep
from shardlib.report.profile.timeline import Part, Span

WIDTH = 10.0  # inches of a picture: where a page shows it, text of 9 points can be read
TEXT = 9


def colour_of(part: Part) -> str:
    """The colour of a part."""
    return PHASES[part.way if part.kind == "compute" else part.kind]


def step_picture(ranks: Sequence[Sequence[Span]]) -> Picture:
    """The parts of a step of each rank on one time axis; what a part is, and how long it took, at the mouse."""
    chart = SpanChart("Parts of a step", "ms")
    seen: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for rank, spans in enumerate(ranks):
        drawn = []
        for part, start, end in _stretches(spans):
            kind = part.way if part.kind == "compute" else part.kind
            seen.setdefault(kind, colour_of(part))
            seconds[kind] = seconds.get(kind, 0.0) + (end - start) * (rank == 0)
            hint = f"rank {rank}: {name_of(part)}, {1e3 * (end - start):.3g} ms from {1e3 * start:.4g} ms on"
            drawn.append(TimeSpan(1e3 * start, 1e3 * end, colour_of(part), "", hint))
        chart.rows.append((f"rank {rank}", drawn))
    text = "rank 0, ms: " + "   ".join(f"{kind} {1e3 * taken:.2f}" for kind, taken in seconds.items())
    return Picture(chart.svg(), text, seen)


def _stretches(spans: Sequence[Span]) -> Iterator[tuple[Part, float, float]]:
    """Parts with start and end, none within another: a part that others interrupt comes several times."""
    around: list[Span] = []
    at = 0.0
    for span in spans:
        while len(around) > span.depth:
            done = around.pop()
            if done.end > at:
                yield done.part, at, done.end
            at = max(at, done.end)
        if around and span.start > at:
            yield around[-1].part, at, span.start
        at = max(at, span.start)
        around.append(span)
    while around:
        done = around.pop()
        if done.end > at:
            yield done.part, at, done.end
        at = max(at, done.end)


def seconds_picture(rows: Mapping[str, Mapping[str, float]], title: str) -> Picture:
    """Seconds as bars, of the ways of a step, or of one kind each (under "")."""
    ways = dict.fromkeys(way for parts in rows.values() for way, taken in parts.items() if way and taken)
    colours = {"": BLUE, **PHASES}
    svg = bar_chart(rows, colours, title, value_format=lambda taken: f"{1e3 * taken:.2f} ms")
    lines = [title, *(f"{name}: {1e3 * sum(parts.values()):.2f} ms" for name, parts in rows.items())]
    return Picture(svg, "\n".join(lines), {way: colours[way] for way in ways})


def draw_profile(
    ranks: Sequence[Sequence[Span]],
    by_kind: Mapping[str, float],
    by_block: Mapping[str, Mapping[str, float]],
    title: str,
    path: str | Path,
) -> None:
    """Writes a PNG: the parts of a step of each rank on one time axis, one rank's seconds by kind, and those by block.

    Raises:
        MissingPackage: matplotlib is not installed; the message says what to install.
    """
    figure = new_figure(WIDTH, 4.6 + 0.3 * len(ranks))
    grid = figure.add_gridspec(2, 2, height_ratios=[0.8 + 0.3 * len(ranks), 3.2])
    _timelines(figure.add_subplot(grid[0, :]), ranks)
    _bars(figure.add_subplot(grid[1, 0]), {kind: {"": seconds} for kind, seconds in by_kind.items()}, {"": BLUE})
    _bars(figure.add_subplot(grid[1, 1]), by_block, PHASES)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _timelines(axes: Any, ranks: Sequence[Sequence[Span]]) -> None:
    from matplotlib.patches import Patch

    shown: dict[str, Patch] = {}
    for rank, spans in enumerate(ranks):
        for span in spans:  # what lies in another span is drawn over it
            colour = colour_of(span.part)
            axes.barh(rank, 1e3 * (span.end - span.start), left=1e3 * span.start, height=0.9, color=colour)
            name = span.part.way if span.part.kind == "compute" else span.part.kind
            shown.setdefault(name, Patch(facecolor=colour, label=name))
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=TEXT)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("ms", fontsize=TEXT)
    axes.legend(handles=list(shown.values()), ncols=len(shown), fontsize=TEXT, frameon=False, loc="lower right",
                bbox_to_anchor=(1, 1))  # fmt: skip
    plain(axes)


def _bars(axes: Any, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> None:
    """One bar for each row, of parts that have a colour each."""
    for number, parts in enumerate(rows.values()):
        left = 0.0
        for name, seconds in parts.items():
            axes.barh(number, 1e3 * seconds, left=left, color=colours[name])
            left += 1e3 * seconds
    axes.set_yticks(range(len(rows)), list(rows), fontsize=TEXT)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms", fontsize=TEXT)
    plain(axes)


def plain(axes: Any) -> None:
    """Leave out ticks and the frame above and on the right."""
    axes.tick_params(labelsize=TEXT, length=0)
    axes.spines[["top", "right"]].set_visible(False)


def write_trace(ranks: Sequence[Sequence[RecordedStep]], path: str | Path) -> None:
    """Writes all recorded steps: a process for each rank, and an event for each span. Missing folders are created."""
    began = min(step.began for steps in ranks for step in steps)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(_events(ranks, began)), "displayTimeUnit": "ms"}))


def _events(ranks: Sequence[Sequence[RecordedStep]], began: float) -> Iterator[dict[str, Any]]:
    for rank, steps in enumerate(ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for step in steps:
            for span in step.spans:
                yield {
                    "ph": "X",
                    "name": name_of(span.part),
                    "cat": span.part.kind,
                    "pid": rank,
                    "tid": 0,
                    "ts": 1e6 * (step.began - began + span.start),
                    "dur": 1e6 * (span.end - span.start),
                }


def name_of(part: Part) -> str:
    """What a part is called in traces."""
    words = (part.way, part.name) if part.kind == "compute" else (part.kind, part.way, part.name)
    return "step" if part.kind == "other" else ": ".join(filter(None, words))

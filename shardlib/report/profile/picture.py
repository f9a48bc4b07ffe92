"""Recorded steps to look at: pictures of what ran when and how long it took, and Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.common.optional import new_figure, save_figure
from shardlib.report.profile.recording import RecordedStep
from shardlib.report.profile.timeline import Part, Span

WIDTH = 10.0  # inches of a picture: where a page shows it, text of 9 points can be read
TEXT = 9
COLOURS = {
    "forward": "#3b6ea8",
    "backward": "#c8553d",
    "recompute": "#d9902f",
    "optimizer": "#4f8a55",
    "communication": "#8c6bb1",
    "wait": "#bdbdbd",
    "offload": "#57a6a1",
    "other": "#6f6f6f",
}


def colour_of(part: Part) -> str:
    """The colour of a part."""
    return COLOURS[part.way if part.kind == "compute" else part.kind]


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
    _bars(figure.add_subplot(grid[1, 0]), {kind: {"": seconds} for kind, seconds in by_kind.items()}, {"": "#3b6ea8"})
    _bars(figure.add_subplot(grid[1, 1]), by_block, COLOURS)
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

"""Chrome's trace format: nested events of every rank, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.report.profile.recording import Recording
from shardlib.report.profile.timeline import Part


def write_trace(recording: Recording, path: str | Path) -> None:
    """Writes all recorded steps: a process for each rank, and an event for each span. Missing folders are created."""
    began = min(step.began for steps in recording.ranks for step in steps)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(_events(recording, began)), "displayTimeUnit": "ms"}))


def _events(recording: Recording, began: float) -> Iterator[dict[str, Any]]:
    for rank, steps in enumerate(recording.ranks):
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

"""One step operator by operator: the floating-point operations of each part, and its time by kind of operator.

Such a step takes longer than others, so that its times serve as shares: what a part takes by the clocks of recorded steps is
divided in proportion to them, and what is left of it is Python's.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.execute.counting import WorkCount, attends, flops_of
from shardlib.report.profile.recording import StepRecorder, TrainStep
from shardlib.report.profile.timeline import Part, StepTimeline

KINDS = ("matmul", "attention", "norm, elementwise")


@dataclass(frozen=True)
class Operators:
    """What the operators of one step did.

    Attributes:
        flops: part -> floating-point operations.
        again: part -> those that fused attention computed again.
        seconds: part -> kind of operator -> seconds in operators of the kind.
    """

    flops: Counter[Part]
    again: Counter[Part]
    seconds: Mapping[Part, Mapping[str, float]]

    def split(self, part: Part, seconds: float) -> dict[str, float]:
        """The seconds of a part by kind of operator; what operators did not take is "Python, other"."""
        found = self.seconds.get(part, {})
        fits = min(1.0, seconds / total) if (total := sum(found.values())) else 0.0
        kinds = {kind: taken * fits for kind, taken in found.items()}
        return kinds | {"Python, other": seconds - sum(kinds.values())}


def operators_of(train_step: TrainStep, state: Any, batch: Any) -> tuple[Any, Operators]:
    """The state after one more step, and what its operators did."""
    mesh = state.params.mesh
    follower = StepRecorder(mesh)
    with follower.installed(), _Timed(follower.timeline, mesh.device) as work:
        state, _ = train_step(state, batch)
    follower.timeline.end()
    counts = {name: Counter({part: done[name] for part, done in work.done.items()}) for name in ("flops", "again")}
    return state, Operators(counts["flops"], counts["again"], work.seconds)


class _Timed(WorkCount):
    """Counts work, and times operators, by the part of the step that runs."""

    def __init__(self, timeline: StepTimeline, device: torch.device) -> None:
        super().__init__(lambda: timeline.now)
        self._timeline, self._waits = timeline, device.type != "cpu"
        self.seconds: dict[Part, defaultdict[str, float]] = {}

    def _run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._run(operator, args, kwargs)
        if self._waits:
            torch.accelerator.synchronize()
        taken = time.perf_counter() - start
        kind = "attention" if attends(operator) else "matmul" if flops_of(operator, args, kwargs, result) else KINDS[2]
        self.seconds.setdefault(self._timeline.now, defaultdict(float))[kind] += taken
        return result

"""The rank that is late, by how much, and in what: compute and wait times of all ranks over some steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib.mesh.mesh import coordinates
from shardlib.plan.tables import table
from shardlib.report.profile.recording import Recorded, RecordedStep, TrainStep, record, require_steps

_NOISE = 0.05  # of a step; ranks that differ by less are not called late


@dataclass(frozen=True)
class Lateness:
    """One rank's share of the steps, medians over them, in seconds.

    Attributes:
        busy: not waiting.
        waited: for other ranks, copies or disks.
        behind: by how much it was busy for longer than the median of the other ranks of its stage; below 0 if shorter.
        most: the part in which it exceeds them most: "forward", "backward", "recompute", "optimizer", ….
    """

    rank: int
    busy: float
    waited: float
    behind: float
    most: str


@dataclass(frozen=True)
class Stragglers(Recorded):
    """What `sl.report.stragglers` found. Printing it shows a table."""

    @cached_property
    def ranks(self) -> Sequence[Lateness]:
        """Every rank, in order."""
        parts = [_medians(steps) for steps in self.recording.ranks]
        places = [coordinates(self.recording.sizes, rank) for rank in range(len(parts))]
        stages = [[place[axis] for axis in self.recording.stages] for place in places]
        return [
            _compared(
                rank, mine, [of for other, of in enumerate(parts) if other != rank and stages[other] == stages[rank]]
            )
            for rank, mine in enumerate(parts)
        ]

    @property
    def late(self) -> Lateness | None:
        """The rank that the others wait for most; None if all are alike (within a twentieth of a step)."""
        worst = max(self.ranks, key=lambda rank: rank.behind)
        return worst if worst.behind > _NOISE * (worst.busy + worst.waited) else None

    def __str__(self) -> str:
        steps = len(self.recording.steps)
        late = self.late
        said = (
            "no rank is late"
            if late is None
            else f"rank {late.rank} is late by {1e3 * late.behind:.2f} ms a step, most of it in {late.most}"
        )
        rows = [
            (str(of.rank), f"{1e3 * of.busy:.2f}", f"{1e3 * of.waited:.2f}", f"{1e3 * of.behind:+.2f}", of.most)
            for of in self.ranks
        ]
        header = ("rank", "busy, ms", "waited, ms", "behind, ms", "most in")
        return f"{said} (medians of {steps} steps)\n\n{table(header, rows)}"


def stragglers(train_step: TrainStep, state: Any, batch: Any, *, steps: int = 10, warm: int = 2) -> Stragglers:
    """Find the rank that is late, by how much, and in which part of the step, from what all compute and wait. Collective.

    Args:
        train_step, state: of `make_train_step`. The state is used up; the one after these steps is ``.state``.
        batch: this rank's share of a batch, which every step is given.
        steps: steps over which medians are taken.
        warm: steps before these.

    >>> state, train_step = sl.make_train_step(lambda p, x: (x @ p).square().mean(), torch.ones(4, 4), sl.optim.sgd(0.1))
    >>> print(sl.report.stragglers(train_step, state, torch.ones(2, 4)).late)
    None
    """
    require_steps("report.stragglers", state, steps, warm)
    state, recording = record(train_step, state, batch, steps, warm)
    return Stragglers(recording, state)


def _medians(steps: Sequence[RecordedStep]) -> Mapping[str, float]:
    """Seconds of each part, by its phase or kind."""
    taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for part, seconds in step.own().items():
            taken[part.way if part.kind == "compute" else part.kind][number] += seconds
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _compared(rank: int, mine: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> Lateness:
    """A rank beside the others that compute what it does; without any it is like itself."""
    others = others or [mine]
    # Starting an exchange may wait too: a transport's own threads take turns with the sender.
    busy = [
        name
        for name in dict.fromkeys(name for of in (mine, *others) for name in of)
        if name not in ("wait", "communication")
    ]
    excess = {name: mine.get(name, 0.0) - statistics.median(of.get(name, 0.0) for of in others) for name in busy}
    total = sum(mine.get(name, 0.0) for name in busy)
    behind = total - statistics.median(sum(of.get(name, 0.0) for name in busy) for of in others)
    return Lateness(rank, total, mine.get("wait", 0.0), behind, max(excess, key=lambda name: excess[name]))

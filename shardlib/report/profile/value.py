"""A `Profile`: where the time and the operations of a step went, as tables, a picture and a trace."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.plan.prediction import StepTime
from shardlib.plan.tables import size, table
from shardlib.report.profile.comm import Comm
from shardlib.report.profile.memory import Memory
from shardlib.report.profile.operators import Operators
from shardlib.report.profile.picture import draw_profile
from shardlib.report.profile.recording import RecordedStep, Recording
from shardlib.report.profile.timeline import Part
from shardlib.report.profile.trace import write_trace

WAYS = ("forward", "backward", "recompute")
OPTIMIZER, LEFT = "optimizer", "Python, other"


class AxisTraffic(NamedTuple):
    """What one rank exchanged along one axis in a step.

    Attributes:
        calls: how many exchanges it took part in.
        payload: bytes that it sent, as plans count them.
        waited: seconds that it waited for them.
        starting: seconds that it took to start them.
    """

    calls: int
    payload: int
    waited: float
    starting: float


@dataclass(frozen=True)
class Profile:
    """What `sl.profile` found. Printing it shows the tables.

    Times are those of this rank in the recorded step of median length. They add up to its wall time.

    Attributes:
        recording: the recorded steps of all ranks.
        operators: what operators did in one more step, which draws as that one did.
        memory: the memory of one more such step: see `sl.report.memory`.
        peak: floating-point operations per second of a large product on this device.
        predicted: the time that the plan predicts of the step, at measured rates.
        state: the train state after all of these steps.
    """

    recording: Recording = field(repr=False)
    operators: Operators = field(repr=False)
    memory: Memory = field(repr=False)
    peak: float
    predicted: StepTime
    state: Any = field(repr=False, compare=False)

    @cached_property
    def step(self) -> RecordedStep:
        """The recorded step of median length, which is the same one on all ranks."""
        return self.recording.steps[self.recording.median]

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.step.seconds

    @cached_property
    def _own(self) -> Mapping[Part, float]:
        return self.step.own()

    @cached_property
    def flops(self) -> Mapping[str, int]:
        """Floating-point operations of this rank in one step: "forward", "backward", "recompute" and "optimizer"."""
        done = dict.fromkeys((*WAYS, OPTIMIZER), 0)
        for part, count in self.operators.flops.items():
            done[part.way if part.kind == "compute" else OPTIMIZER] += count
        again = {part: count for part, count in self.operators.again.items() if part.way in WAYS}
        for part, count in again.items():
            done[part.way] -= count
            done["recompute"] += count
        return done

    @property
    def mfu(self) -> float:
        """Share of the peak (model FLOPs utilisation): operations of forward and backward per second of the step."""
        return (self.flops["forward"] + self.flops["backward"]) / self.seconds / self.peak

    @property
    def hfu(self) -> float:
        """Share of the peak (hardware FLOPs utilisation): what is computed again counts too."""
        return sum(self.flops.values()) / self.seconds / self.peak

    @cached_property
    def by_kind(self) -> Mapping[str, float]:
        """Seconds by kind: "matmul", "attention", "norm, elementwise", "optimizer", "communication", "wait", "offload",
        "Python, other"."""
        kinds: defaultdict[str, float] = defaultdict(float)
        for part, seconds in self._own.items():
            if part.kind == "compute":
                for kind, taken in self.operators.split(part, seconds).items():
                    kinds[kind] += taken
            else:
                kinds[LEFT if part.kind == "other" else part.kind] += seconds
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))

    @cached_property
    def by_block(self) -> Mapping[str, Mapping[str, float]]:
        """Unit of a block, or path of a module's part -> way -> seconds of computation, waits left out."""
        blocks: dict[str, dict[str, float]] = {}
        for part, seconds in self._own.items():
            if part.kind == "compute":
                ways = blocks.setdefault(part.name, dict.fromkeys(WAYS, 0.0))
                ways[part.way] += seconds
        return blocks

    @cached_property
    def by_axis(self) -> Mapping[str, AxisTraffic]:
        """Mesh axis -> what this rank exchanged along it."""
        found = {}
        for axis, ways in self.recording.sizes.items():
            if ways > 1:
                exchanges = [exchange for exchange in self.step.exchanges if exchange.axis == axis]
                found[axis] = AxisTraffic(
                    len(exchanges),
                    sum(exchange.payload for exchange in exchanges),
                    self._seconds_of("wait", axis),
                    self._seconds_of("communication", axis),
                )
        return found

    def _seconds_of(self, kind: str, axis: str) -> float:
        return sum(seconds for part, seconds in self._own.items() if (part.kind, part.way) == (kind, axis))

    @property
    def comm(self) -> Comm:
        """The exchanges of the last recorded step: see `sl.report.comm`."""
        return Comm(self.recording, self.state)

    def trace(self, path: str | Path) -> None:
        """Writes the step of every rank as a Chrome trace, for chrome://tracing or ui.perfetto.dev; ranks are processes."""
        write_trace(self.recording, path)

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: the step's parts on a time axis, and its time by kind and by block.

        Raises:
            MissingPackage: matplotlib is not installed; the message says what to install.
        """
        spans = [steps[self.recording.median].spans for steps in self.recording.ranks]
        draw_profile(spans, self.by_kind, self.by_block, next(self._sections()), path)

    def __str__(self) -> str:
        return "\n\n".join(section for section in self._sections() if section)

    def _sections(self) -> Iterator[str]:
        yield (
            f"step {_ms(self.seconds)} ms on rank {self.recording.rank} (median of {len(self.recording.steps)}): "
            f"{sum(self.flops.values()) / 1e9:.4g} GFLOP, {self.mfu:.1%} of the peak of {self.peak / 1e9:.4g} GFLOP/s "
            f"({self.hfu:.1%} with what is computed again)"
        )
        rows = [(way, f"{count / 1e9:.4g}") for way, count in self.flops.items() if count]
        yield table(("GFLOP", ""), rows, right=1)
        yield table(("time", "ms", ""), _shares(self.by_kind), right=2)
        yield table(
            ("block, ms", *WAYS, "all", "at the peak"),
            [
                (name, *map(_ms, ways.values()), _ms(sum(ways.values())), size(self.memory.by_block.get(name, 0)))
                for name, ways in self.by_block.items()
            ],
            right=5,
        )
        yield self.memory.summary
        if self.by_axis:
            yield table(
                ("axis", "exchanges", "sent", "waited, ms", "starting, ms"),
                [
                    (axis, str(of.calls), size(of.payload), _ms(of.waited), _ms(of.starting))
                    for axis, of in self.by_axis.items()
                ],
                right=4,
            )
        compute, rest = self.predicted.compute, self.predicted.exposed
        mine = self.seconds - sum(seconds for part, seconds in self._own.items() if part.kind == "wait")
        yield table(
            ("ms", "predicted", "measured"),
            [
                ("step", _ms(self.predicted.total), _ms(self.seconds)),
                ("busy", _ms(compute), _ms(mine)),
                ("waiting", _ms(rest), _ms(self.seconds - mine)),
            ],
            right=2,
        )
        if len(self.recording.ranks) > 1:
            yield table(
                ("rank", "step, ms", "waiting, ms"),
                [(str(rank), _ms(total), _ms(waits)) for rank, (total, waits) in enumerate(_of_ranks(self.recording))],
                right=2,
            )


def _of_ranks(recording: Recording) -> Sequence[tuple[float, float]]:
    """Of each rank the medians of its steps' times, and of what it waited in them."""
    found = []
    for steps in recording.ranks:
        waits = [sum(s for part, s in step.own().items() if part.kind == "wait") for step in steps]
        found.append((statistics.median(step.seconds for step in steps), statistics.median(waits)))
    return found


def _shares(seconds: Mapping[str, float]) -> list[tuple[str, str, str]]:
    total = sum(seconds.values())
    return [(name, _ms(taken), f"{taken / total:.1%}") for name, taken in seconds.items()]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

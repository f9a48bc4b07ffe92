"""`profile`: where the time, the operations and the memory of a step went, as tables, a picture and a trace."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.common.display.panels import Fold, Grid, Panel, Shown, Title
from shardlib.execute.counting import WorkCount, attends, flops_of
from shardlib.mesh.mesh import coordinates
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import StepTime, predict_step
from shardlib.plan.tables import size, table
from shardlib.report.measure import measure_peak
from shardlib.report.profile.comm import Comm
from shardlib.report.profile.exchanges import meetings
from shardlib.report.profile.memory import Memory, memory
from shardlib.report.profile.picture import draw_profile, seconds_picture, step_picture, write_trace
from shardlib.report.profile.recording import (
    RecordedStep,
    Recording,
    StepRecorder,
    TrainStep,
    drawing_as,
    record,
    require_steps,
)
from shardlib.report.profile.timeline import Part, StepTimeline

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
class Profile(Shown):
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
        write_trace(self.recording.ranks, path)

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: the step's parts on a time axis, and its time by kind and by block.

        Raises:
            MissingPackage: matplotlib is not installed; the message says what to install.
        """
        spans = [steps[self.recording.median].spans for steps in self.recording.ranks]
        draw_profile(spans, self.by_kind, self.by_block, self.summary, path)

    def __str__(self) -> str:
        grids = [table(grid.header, grid.rows, grid.right) for grid in self._grids()]
        return "\n\n".join([self.summary, *grids[:3], self.memory.summary, *grids[3:]])

    @property
    def summary(self) -> str:
        """How long the step took, what it computed, and the share of the peak that this is."""
        return (
            f"step {_ms(self.seconds)} ms on rank {self.recording.rank} (median of {len(self.recording.steps)}): "
            f"{sum(self.flops.values()) / 1e9:.4g} GFLOP, {self.mfu:.1%} of the peak of {self.peak / 1e9:.4g} GFLOP/s "
            f"({self.hfu:.1%} with what is computed again)"
        )

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: the step's parts on a time axis, bars of its time, tables, and memory."""
        yield Title(f"Profile: {self.summary}")
        yield step_picture([steps[self.recording.median].spans for steps in self.recording.ranks])
        yield seconds_picture({kind: {"": taken} for kind, taken in self.by_kind.items()}, "Time of a step by kind")
        yield seconds_picture(self.by_block, "Time of computation by block")
        _, _, _, *rest = self._grids()
        yield from rest
        yield Fold("Memory", list(self.memory.shown()))
        if self.by_axis:
            yield Fold("Exchanges", list(self.comm.shown()))

    def _grids(self) -> Iterator[Grid]:
        """The tables; the first three are always there."""
        flops = [(way, f"{count / 1e9:.4g}") for way, count in self.flops.items() if count]
        yield Grid(("GFLOP", ""), flops, 1, "Operations of a step")
        yield Grid(("time", "ms", ""), _shares(self.by_kind), 2, "Time of a step")
        blocks = [
            (name, *map(_ms, ways.values()), _ms(sum(ways.values())), size(self.memory.by_block.get(name, 0)))
            for name, ways in self.by_block.items()
        ]
        yield Grid(("block, ms", *WAYS, "all", "at the peak"), blocks, 5, "Time of computation")
        if self.by_axis:
            axes = [
                (axis, str(of.calls), size(of.payload), _ms(of.waited), _ms(of.starting))
                for axis, of in self.by_axis.items()
            ]
            yield Grid(("axis", "exchanges", "sent", "waited, ms", "starting, ms"), axes, 4, "Exchanges of a step")
        compute, rest = self.predicted.compute, self.predicted.exposed
        mine = self.seconds - sum(seconds for part, seconds in self._own.items() if part.kind == "wait")
        times = [
            ("step", _ms(self.predicted.total), _ms(self.seconds)),
            ("busy", _ms(compute), _ms(mine)),
            ("waiting", _ms(rest), _ms(self.seconds - mine)),
        ]
        yield Grid(("ms", "predicted", "measured"), times, 2, "Predicted and measured")
        if len(self.recording.ranks) > 1:
            ranks = [
                (str(rank), _ms(total), _ms(waits)) for rank, (total, waits) in enumerate(_of_ranks(self.recording))
            ]
            yield Grid(("rank", "step, ms", "waiting, ms"), ranks, 2, "Ranks")


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


# One step operator by operator: the floating-point operations of each part, and its time by kind of operator. Such a step
# takes longer than others, so that its times serve as shares: what a part takes by the clocks of recorded steps is divided in
# proportion to them, and what is left of it is Python's.


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
        return kinds | {LEFT: seconds - sum(kinds.values())}


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
        multiplies = flops_of(operator, args, kwargs, result)
        kind = "attention" if attends(operator) else "matmul" if multiplies else "norm, elementwise"
        self.seconds.setdefault(self._timeline.now, defaultdict(float))[kind] += taken
        return result


# The time that a plan predicts of a step, at the rates that were measured in it.


def predicted(plan: Plan, recording: Recording) -> StepTime:
    """The plan's step on the virtual clock, with measured seconds of computation and measured bandwidths."""
    times = [_of(steps) for steps in recording.ranks]
    forward = _of_all_stages(plan, recording.sizes, [of["forward"] for of in times])
    backward = _of_all_stages(plan, recording.sizes, [of["backward"] for of in times])
    return predict_step(
        plan,
        forward / plan.stages.schedule.microbatches,
        _bandwidths(recording),
        backward=backward / forward if forward else 0.0,
        update=statistics.fmean(of["update"] for of in times),
        owned=_owned(plan, recording.steps),
    )


def _owned(plan: Plan, steps: Sequence[RecordedStep]) -> bool:
    """Whether the optimizer summed over its axis itself in these steps (1-bit Adam, once its variance is frozen): by the
    bytes that were sent along it."""
    if plan.reductions.owner is None:
        return False
    axis = plan.reductions.owner.axis
    sent = statistics.fmean(sum(each.payload for each in step.exchanges if each.axis == axis) for step in steps)
    before, since = (abs(sent - plan.payload(owned=owned).get(axis, 0)) for owned in (False, True))
    return since < before


def _of(steps: Sequence[RecordedStep]) -> Mapping[str, float]:
    """Median seconds of forward, of backward with what is computed again, and of the rest in which nothing is waited for:
    optimizer, offload, starting exchanges, Python."""
    taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for part, seconds in step.own().items():
            if part.kind == "compute":
                taken["forward" if part.way == "forward" else "backward"][number] += seconds
            elif part.kind != "wait":
                taken["update"][number] += seconds
    return {name: statistics.median(taken[name]) for name in ("forward", "backward", "update")}


def _of_all_stages(plan: Plan, sizes: Mapping[str, int], seconds: Sequence[float]) -> float:
    """The sum over the coordinates of the stages' axis of the mean over the ranks there."""
    homes: defaultdict[int, list[float]] = defaultdict(list)
    for rank, taken in enumerate(seconds):
        homes[plan.stages.home(coordinates(sizes, rank)) if plan.stages.axes else 0].append(taken)
    return sum(map(statistics.fmean, homes.values()))


def _bandwidths(recording: Recording) -> dict[str, float]:
    """Axis -> bytes per second of one rank, from exchanges that somebody waited for: others end unseen."""
    sent: defaultdict[str, int] = defaultdict(int)
    taken: defaultdict[str, float] = defaultdict(float)
    for steps in zip(*recording.ranks, strict=True):
        for meeting in meetings(recording.sizes, [step.exchanges for step in steps]):
            if meeting.payload and meeting.waited > meeting.seconds / 2 > 0:
                sent[meeting.first.axis] += meeting.payload
                taken[meeting.first.axis] += meeting.seconds
    return {axis: sent[axis] / taken[axis] for axis in sent}


def profile(
    train_step: TrainStep, state: Any, batch: Any, *, steps: int = 5, warm: int = 2, plan: Plan | None = None
) -> Profile:
    """Where the time and the operations of a train step go, on every rank. Collective.

    Takes ``warm`` steps that are not looked at, then ``steps`` with clocks at the boundaries of blocks, phases and exchanges,
    one in which operators are counted and timed, and one in which memory gets its names. All of them train: the state after
    them is ``.state``. The last two draw by the number of the recorded step of median length, as they are compared with it:
    the same layers and tokens are left out, and the loss is given the same ``rng``. The peak is that of a large product on
    the same device and dtype, measured once.

    Args:
        train_step, state: of `make_train_step`. The state is used up.
        batch: this rank's share of a batch, which every step is given.
        plan: the step's plan as `make_plan` makes it with ``loss_fn``, ``batch`` and ``optimizer``, which knows what is sent
            inside the loss and the peak of memory; by default the state's, which does not.

    Raises:
        TypeError: a state that is no `TrainState`, or a plan that is no `Plan`.
        ValueError: fewer than one step, fewer than none before, or no whole numbers of them; a plan of other parameters, or
            of another mesh, than the state's.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(64, 64)}, sl.optim.sgd(0.1))
    >>> found = sl.profile(train_step, state, torch.ones(32, 64))
    >>> found.flops["forward"] == 2 * 32 * 64 * 64
    True
    >>> round(sum(found.by_kind.values()) / found.seconds, 6)
    1.0
    """
    require_steps("profile", state, steps, warm, plan)
    params = state.params
    peak = measure_peak(params.mesh.device, params.plan.computed_dtype)
    state, recording = record(train_step, state, batch, steps, warm)
    # Steps differ in the layers and tokens that they leave out: what is counted must be what was timed.
    again = drawing_as(train_step, state.step - steps + recording.median)
    state, operators = operators_of(again, state, batch)
    held = memory(again, state, batch, warm=0, plan=plan)
    return Profile(recording, operators, held, peak, predicted(plan or params.plan, recording), held.state)

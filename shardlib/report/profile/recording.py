"""Steps as they were recorded: clocks at the boundaries of blocks, phases and exchanges, on every rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.common._compat import graph_task
from shardlib.common.environment import within
from shardlib.errors import listing
from shardlib.execute.phases import Phase, Phases, followed, made_of
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import TrainState
from shardlib.plan.bucketing import unit_names
from shardlib.plan.plan import Plan
from shardlib.report.profile.exchanges import ProfiledExchange, TimedGroup
from shardlib.report.profile.modules import ModuleHooks
from shardlib.report.profile.timeline import Part, Span, StepTimeline
from shardlib.tree import leaves_of, unflatten

TrainStep = Callable[[Any, Any], tuple[Any, Any]]
OUTSIDE = "outside of blocks"


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank.

    Attributes:
        began: when it began, by the clock of all ranks (see `Recording`).
        spans: its parts.
        exchanges: those that it made, in order; their times by the same clock.
    """

    began: float
    spans: Sequence[Span]
    exchanges: Sequence[ProfiledExchange]

    @property
    def seconds(self) -> float:
        """The step's wall time."""
        return self.spans[0].end

    def own(self) -> dict[Part, float]:
        """Part -> seconds in it and in no part within it; they add up to the step's."""
        seconds: defaultdict[Part, float] = defaultdict(float)
        for span in self.spans:
            seconds[span.part] += span.own
        return seconds


@dataclass(frozen=True)
class Recording:
    """Some steps of all ranks. Times of different ranks are by one clock: ranks of one host share theirs, and those of others
    are compared when they leave an exchange together.

    Attributes:
        sizes: axis name -> size of the mesh.
        stages: the axes along which ranks compute different stages.
        rank: this rank.
        ranks: the steps of each rank.
    """

    sizes: dict[str, int]
    stages: tuple[str, ...]
    rank: int
    ranks: Sequence[Sequence[RecordedStep]]

    @property
    def steps(self) -> Sequence[RecordedStep]:
        """This rank's."""
        return self.ranks[self.rank]

    @cached_property
    def median(self) -> int:
        """The number of the step of median length: one for all ranks, by what it took them together."""
        taken = [sum(step.seconds for step in together) for together in zip(*self.ranks, strict=True)]
        return sorted(range(len(taken)), key=taken.__getitem__)[len(taken) // 2]


@dataclass(frozen=True)
class Recorded:
    """What is found in recorded steps.

    Attributes:
        recording: the steps of all ranks.
        state: the train state after them.
    """

    recording: Recording = field(repr=False)
    state: Any = field(repr=False, compare=False)


class StepRecorder:
    """What is noted of one step of a mesh's rank while it runs.

    Attributes:
        timeline: its parts.
        exchanges: its exchanges.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.timeline: StepTimeline = StepTimeline(mesh.device)
        self.exchanges: list[ProfiledExchange] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context whose steps are noted."""
        mesh = self._mesh

        def timed(axis: str, group: Any) -> TimedGroup:
            return TimedGroup(axis, group, mesh.traffic, self.timeline, self.exchanges)

        made = followed(lambda executor: _Clocked(executor, self.timeline))
        with within(clock=self.timeline), mesh.through(timed), made:
            yield


class _Clocked(Phases):
    """The phases of a micro-batch on a timeline: of blocks, or, outside of them, of the parts of modules."""

    def __init__(self, executor: Any, timeline: StepTimeline) -> None:
        self._executor, self._timeline = executor, timeline
        self._named: dict[int, str] = {}  # number of a block, from 1, or of a part of a module, below 0 -> its name
        self._place, self._back = 0, False
        plan = executor.plan
        # Path -> its unit before small ones are merged: blocks of one merged unit keep names of their own.
        names = unit_names(unflatten(plan.shape.treedef, plan.shape.paths))
        self._elements = dict(zip(plan.shape.paths, names, strict=True))
        (stage, *_) = plan.local_stages
        super().__init__(plan.stages.spans[stage][0] if plan.stages.axes else 0)
        self._parts = ModuleHooks(self._part_begins, self._part_ends, lambda leaf: self._paths.get(id(leaf)))

    def begin(self) -> None:
        super().begin()
        self._paths: dict[int, str] = {}  # identity of a leaf that stands for a parameter -> path
        self._given: list[torch.Tensor] = []  # to the part that runs

    @contextmanager
    def running(self, backward: bool) -> Iterator[None]:
        self._back = backward
        with super().running(backward), self._parts.watching():
            self._place = self._timeline.open(self._part())
            try:
                yield
            finally:
                self._timeline.close(self._place)

    def turned(self) -> None:
        self._timeline.turn(self._place, self._part())

    def knows(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self._paths = {id(leaf): path for path, leaf in leaves.items()}

    def meets(self, number: int, args: tuple[Any, ...]) -> None:
        tensors = (leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor))
        names = (self._elements.get(self._paths.get(id(t), "")) or self._executor.unit_of(t) for t in tensors)
        self._named[number] = next(filter(None, names), f"block {number}")

    def _part_begins(self, path: str, given: list[torch.Tensor]) -> None:
        """Begin a part of a module. In backward it ends where the gradients of what it was given are there; if a part has
        returned that, its backward begins there."""
        if self._elsewhere():
            return
        number = -1 - len(self._named)
        self._named[number] = path
        self._at_gradient([x for x in given if not self._met(x)], Phase(True))
        self._forward, self._given = Phase(False, "of", number), given
        self.turned()

    def _part_ends(self, path: str, result: list[torch.Tensor]) -> None:
        if self._elsewhere():
            return
        self._at_gradient(made_of(result, self._given), self._forward._replace(backward=True))
        self._meet(result)
        self._forward, self._given = Phase(False), []
        self.turned()

    def _elsewhere(self) -> bool:
        """Whether a part runs in a block, or as backward recomputes it: there its time is theirs."""
        return self._inside or graph_task() != -1

    def _part(self) -> Part:
        way = "recompute" if self.recomputing else "backward" if self._back else "forward"
        return Part("compute", way, self.name_of(self.at(self._back)))

    def name_of(self, phase: Phase) -> str:
        """The element of a list, or the unit, that a phase's block has parameters of; or the path of its module's part."""
        return self._named[phase.block] if phase.place == "of" else OUTSIDE


def require_steps(verb: str, state: Any, steps: int = 1, warm: int = 0, plan: Any = None) -> None:
    """Refuse what cannot be recorded.

    Raises:
        TypeError: a state that is no `TrainState`, or a plan that is no `Plan`.
        ValueError: fewer than one step, fewer than none before, or no whole numbers of them; a plan of other parameters, or
            of another mesh, than the state's.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"{verb}: the state is a {type(state).__name__}; pass the one that make_train_step returned")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{verb}: the plan is a {type(plan).__name__}; pass the one that sl.make_plan returned")
    if plan is not None and (other := _differing(plan, state.params.plan)):
        raise ValueError(
            f"{verb}: the plan is not that of this state:\n{listing(other)}\nMake it with the parameters, the mesh and "
            "the transforms of the step"
        )
    if not all(isinstance(count, Integral) for count in (steps, warm)) or steps < 1 or warm < 0:
        raise ValueError(f"{verb}: steps={steps!r}, warm={warm!r}; record at least one step, after none or more others")


def _differing(plan: Plan, own: Plan) -> list[str]:
    """Where a plan has other axes or shards than a state's own."""
    given, held = (
        {f"axis {axis!r}": f"size {size}" for axis, size in of.sizes.items()}
        | {path: f"{tuple(leaf.param.shape)} as {leaf.param.spec!r}" for path, leaf in of.placement_of.items()}
        for of in (plan, own)
    )
    return [
        f"{name}: {given.get(name, 'not there')} in the plan, {held.get(name, 'not there')} in the state"
        for name in {**held, **given}
        if held.get(name) != given.get(name)
    ]


def stepped(train_step: TrainStep, state: Any, batch: Any) -> tuple[Any, RecordedStep]:
    """One step with its record: the next state, and what was noted."""
    follower = StepRecorder(state.params.mesh)
    with follower.installed():
        state, _ = train_step(state, batch)
    return state, RecordedStep(follower.timeline.began, follower.timeline.end(), follower.exchanges)


def drawing_as(train_step: TrainStep, number: int) -> TrainStep:
    """A train step that draws what the step of a number drew: the layers and tokens that it leaves out, and the loss's own
    draws. The state after it has the number that is due."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        now, state.step = state.step, number
        try:
            after, metrics = train_step(state, batch)
        finally:
            state.step = now
        after.step = now + 1
        return after, metrics

    return step


def record(train_step: TrainStep, state: Any, batch: Any, steps: int, warm: int) -> tuple[Any, Recording]:
    """Record some steps, after ``warm`` ones that are not recorded; returns the state after them. Collective."""
    mesh = state.params.mesh
    for _ in range(warm):
        state, _ = stepped(train_step, state, batch)
    taken = []
    for _ in range(steps):
        state, step = stepped(train_step, state, batch)
        taken.append(step)
    return state, gathered(mesh, state.params.plan.stages.axes, taken)


def gathered(mesh: Mesh, stages: tuple[str, ...], steps: Sequence[RecordedStep]) -> Recording:
    """The steps of all ranks, by one clock. Collective."""
    ahead = _ahead(mesh)
    for step in steps:
        for exchange in step.exchanges:
            exchange.start -= ahead
            exchange.end = exchange.end and exchange.end - ahead
    moved = [RecordedStep(step.began - ahead, step.spans, step.exchanges) for step in steps]
    return Recording(dict(mesh.shape), stages, mesh.rank, primitives.all_gather_object(mesh, list(mesh.shape), moved))


_MEETINGS = 9


def _ahead(mesh: Mesh) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's: 0 on rank 0's host, whose processes share one clock."""
    axes = list(mesh.shape)
    hosts = primitives.all_gather_object(mesh, axes, _host())
    differences = []
    for _ in range(_MEETINGS if len(set(hosts)) > 1 else 0):
        primitives.all_gather_object(mesh, axes, None)  # all leave together
        times = primitives.all_gather_object(mesh, axes, time.perf_counter())
        differences.append(times[mesh.rank] - times[0])
    return 0.0 if hosts[mesh.rank] == hosts[0] else sorted(differences)[_MEETINGS // 2]


def _host() -> str:
    """What processes with one clock have in common: a host since its last start."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        import platform

        return platform.node()

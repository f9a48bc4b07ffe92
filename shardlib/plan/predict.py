"""The time of a step: the plan's exchanges, with given compute times, on a virtual clock.

A rank has one processor, and one link for every mesh axis; each does one thing at a time. Work overlaps as in the executor:
the next unit is gathered while one computes, a unit's gradients are reduced while backward goes on, a rank waits for its
activations' collectives and not for its messages to other stages, and the update starts when every rank has every gradient
(the global norm needs all of them). Ranks differ along the stages' axis only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.errors import MeshError, listing
from shardlib.plan.exchanges import Exchange, Op, tied_bytes
from shardlib.plan.value import PlanValue
from shardlib.schedules import Action, Kind
from shardlib.schedules.running import run


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, in seconds.

    Attributes:
        total: time from the batch to the next parameters.
        ranks: time each rank along the stages' axis computes; one number for one stage.
        links: axis -> time its link is busy, on the rank where it is busiest.
    """

    total: float
    ranks: tuple[float, ...]
    links: Mapping[str, float]

    @property
    def compute(self) -> float:
        """Time that the rank which computes most computes."""
        return max(self.ranks)

    @property
    def exposed(self) -> float:
        """Time that the rank which computes most waits, for links and for other stages."""
        return self.total - self.compute

    @property
    def bubble(self) -> float:
        """Waiting time over computing time, all ranks together, as in `shardlib.schedules.Timeline`."""
        return self.total * len(self.ranks) / sum(self.ranks) - 1

    def __str__(self) -> str:
        links = "".join(f", {axis} busy {seconds:.4g} s" for axis, seconds in self.links.items())
        bubble = f", bubble {self.bubble:.1%}" if len(self.ranks) > 1 else ""
        return f"step {self.total:.4g} s: compute {self.compute:.4g} s, waiting {self.exposed:.4g} s{bubble}{links}"


def predict_step(
    plan: PlanValue,
    forward: float | Mapping[str, float],
    bandwidth: Mapping[str, float],
    *,
    backward: float = 2.0,
    update: float = 0.0,
    owned: bool = False,
) -> StepTime:
    """The predicted time of one step of a plan.

    Messages between stages take time only if the plan was traced (``make_plan(..., loss_fn=, batch=)``). A
    backward that the schedule splits takes half its time for input gradients and half for weight gradients.

    Args:
        forward: seconds of one micro-batch's forward: of all units together (divided in proportion to their elements), or
            unit by unit.
        bandwidth: axis -> bytes per second that one rank sends; axes that are left out take no time.
        backward: seconds of backward per second of forward.
        update: seconds of the optimizer, on each rank.
        owned: predicts a step whose optimizer sums over its axis itself, after backward (1-bit Adam, once frozen).

    Raises:
        MeshError: an axis or a unit that the plan does not have, or ``owned`` where no optimizer owns an axis.

    >>> plan = sl.make_plan({"w": torch.ones(1000, 1000)}, sl.abstract_mesh(data=2), sl.zero(1))
    >>> predicted = sl.report.predict_step(plan, forward=0.001, bandwidth={"data": 1e9})
    >>> round(predicted.total, 3)
    0.007
    """
    plan = plan.everywhere
    units = plan.tiled.units
    unknown = [f"axis {axis!r}" for axis in bandwidth if axis not in plan.sizes]
    unknown += [f"unit {unit!r}" for unit in forward if unit not in units] if isinstance(forward, Mapping) else []
    if unknown:
        raise MeshError(f"the plan does not have\n{listing(unknown)}\nIt has axes {list(plan.sizes)} and units {units}")
    if owned and plan.reductions.owner is None:
        raise MeshError("no optimizer of this plan owns an axis; pass one that does to make_plan: optimizer=...")
    ranks = _run(plan, _stages(plan, forward), bandwidth, backward, update, owned)
    links = {axis: max(rank.busy.get(axis, 0.0) for rank in ranks) for axis in bandwidth}
    return StepTime(max(rank.now for rank in ranks), tuple(rank.computed for rank in ranks), links)


@dataclass(frozen=True)
class _Stage:
    """A stage's part of the plan, and seconds of forward by unit, in the order of forward."""

    plan: PlanValue
    forward: Mapping[str, float]

    @property
    def backward(self) -> dict[str, float]:
        return {unit: self.forward[unit] for unit in reversed(list(self.forward))}


def _stages(plan: PlanValue, forward: float | Mapping[str, float]) -> list[_Stage]:
    """The stages with their units' times. A unit that several stages use (of a tied leaf) computes in each of them."""
    plans = [stage.tiled for stage in plan.stage_plans]
    if isinstance(forward, Mapping):
        return [_Stage(stage, {unit: forward.get(unit, 0.0) for unit in stage.units}) for stage in plans]
    elements = [
        {unit: sum(b.size(0) for b in buckets) for unit, buckets in stage.buckets_of.items()} for stage in plans
    ]
    whole = sum(sum(counts.values()) for counts in elements) or 1
    return [
        _Stage(stage, {unit: forward * count / whole for unit, count in counts.items()})
        for stage, counts in zip(plans, elements)
    ]


def _run(
    plan: PlanValue,
    stages: Sequence[_Stage],
    bandwidth: Mapping[str, float],
    backward: float,
    update: float,
    owned: bool,
) -> list[_Rank]:
    """The ranks along the stages' axis, as they are at the end of the step."""
    schedule, owner = plan.stages.schedule, plan.reductions.owner
    ranks = [_Rank(bandwidth, owner.axis if owned and owner else None) for _ in range(schedule.ranks)]
    last = {a.stage: a.microbatch for order in schedule.orders for a in order if a.kind in (Kind.B, Kind.W)}
    ready: dict[Action | None, float] = {None: 0.0}  # an action -> when its result has arrived where it is needed

    def visit(rank_number: int, action: Action, need: Action | None) -> None:
        (number, kind, microbatch), rank = action, ranks[rank_number]
        stage, final = stages[number], last[number] == microbatch
        rank.now = max(rank.now, ready[need])
        if kind is Kind.F:
            rank.walk(stage.plan, stage.forward, 1.0, first=True)
        elif kind is Kind.I:
            rank.walk(stage.plan, stage.backward, backward / 2)
        elif kind is Kind.W:
            rank.walk(stage.plan, stage.backward, backward / 2, final, whole=False)
        else:
            rank.walk(stage.plan, stage.backward, backward, final)
        if kind is not Kind.W:
            result = Action(number, Kind.B if kind is Kind.I else kind, microbatch)
            ready[result] = pass_on(rank, number, kind is Kind.F)

    def pass_on(rank: _Rank, stage: int, forwards: bool) -> float:
        other = stage + 1 if forwards else stage - 1
        if (
            plan.traces is None
            or not 0 <= other < schedule.stages
            or schedule.rank_of[other] == schedule.rank_of[stage]
        ):
            return rank.now
        count = plan.traces[stage].forward if forwards else plan.traces[other].backward
        (axis,) = plan.stages.axes
        return rank.send(axis, count, rank.now)

    run(schedule, visit)
    _update(plan, ranks, update)
    return ranks


def _update(plan: PlanValue, ranks: Sequence[_Rank], update: float) -> None:
    """The update, which starts when every rank has its gradients, and the gathers after it."""
    for rank in ranks:
        rank.now = max(rank.now, rank.reduced)
    for axis in plan.stages.axes:
        for bucket in plan.trained:
            count = (len(bucket.homes) - 1) * tied_bytes(bucket)
            for rank in (ranks[home] for home in bucket.homes):
                rank.now = rank.send(axis, count, rank.now)
    start = max(rank.now for rank in ranks)
    for view, rank in zip(plan.views, ranks, strict=True):
        rank.now = start
        if rank.owned is not None:
            means = [view.routes[bucket.name].mean for bucket in view.trained]
            rank.now = rank.send(rank.owned, sum(mean.payload for mean in means if mean), rank.now)
        for axis, sent in view.needs[0].payload.items() if view.needs else ():
            rank.now = rank.send(axis, sent, rank.now)
        rank.compute(update)
        stored = [rank.along(view.routes[bucket.name].restore) for bucket in view.trained]
        rank.now = max([rank.now, *stored])


@dataclass
class _Rank:
    """The clocks of one rank.

    Attributes:
        bandwidth: axis -> bytes per second.
        owned: the axis that the optimizer sums over itself, or None.
        now: the time on the processor.
        computed: seconds that the processor has computed.
        reduced: when the last reduction of gradients is done.
        busy: axis -> seconds that the link was busy.
    """

    bandwidth: Mapping[str, float]
    owned: str | None = None
    now: float = 0.0
    computed: float = 0.0
    reduced: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # axis -> when the link's last message is through
    _arrival: dict[str, float] = field(default_factory=dict)  # unit -> when its gather is done

    def walk(
        self,
        plan: PlanValue,
        seconds: Mapping[str, float],
        factor: float,
        last: bool | None = None,
        whole: bool = True,
        first: bool = False,
    ) -> None:
        """Compute ``factor * seconds`` of each unit in turn, with the unit's gathers, activations and reductions.

        Args:
            last: None in a walk without gradients; else whether its gradients are the step's last.
            whole: whether parameters are gathered and activations exchanged; not so for weight gradients alone.
            first: whether this is the micro-batch's first walk.
        """
        units = list(seconds)
        (stage,) = plan.local_stages
        sent = plan.traces[stage].activations if whole and plan.traces else {}
        for position, unit in enumerate(units):
            if whole:
                self._gather(plan, unit, first)
                self.now = max(self.now, self._arrival[unit])
                if position + 1 < len(units) and plan.step.prefetch:
                    self._gather(plan, units[position + 1], first)
            self.compute(factor * seconds[unit])
            for axis, count in sent.items():
                self.now = self.send(axis, count / 2 / len(units), self.now)
            if last is not None:
                self._reduce(plan, unit, last)
        self._arrival.clear()

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def send(self, axis: str, count: float, ready: float) -> float:
        """The time at which ``count`` bytes, ready at time ``ready``, have gone over an axis' link."""
        if axis not in self.bandwidth or not count:
            return ready
        seconds = count / self.bandwidth[axis]
        self._free[axis] = max(ready, self._free.get(axis, 0.0)) + seconds
        self.busy[axis] = self.busy.get(axis, 0.0) + seconds
        return self._free[axis]

    def along(self, route: Sequence[Exchange]) -> float:
        """The time at which a bucket's exchanges are done, if they start now; the optimizer's own sums take no time."""
        ready = self.now
        for exchange in route:
            owned = exchange.op is Op.SUM and exchange.axis == self.owned
            ready = self.send(exchange.axis, 0 if owned else exchange.payload, ready)
        return ready

    def _gather(self, plan: PlanValue, unit: str, first: bool) -> None:
        if unit not in self._arrival:
            routes = [plan.routes[bucket.name] for bucket in plan.buckets_of[unit]]
            self._arrival[unit] = max(self.along(route.gather if first else route.again) for route in routes)

    def _reduce(self, plan: PlanValue, unit: str, last: bool) -> None:
        for bucket in plan.trained_in.get(unit, ()):
            route = plan.routes[bucket.name]
            self.reduced = max(self.reduced, self.along(route.reductions if last else route.each))

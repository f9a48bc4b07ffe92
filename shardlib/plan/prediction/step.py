"""The time of a step: the plan's exchanges, with given compute times, on a virtual clock.

A rank has one processor, one link for every mesh axis, one to its host's memory and one from it, one for reading its disks
and one for writing them, and a host that updates what is not on the device; each does one thing at a time. Work overlaps as
in the executor: the next unit comes up and is gathered while one computes, a unit's gradients are reduced and go down while
backward goes on, a rank waits for its activations' collectives and not for its messages to other stages, and the update
starts when every rank has every gradient (the global norm needs all of them). Ranks differ along the stages' axis only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import MeshError, axes_named, listing
from shardlib.plan.prediction.rank import Rank
from shardlib.plan.prediction.update import run_update
from shardlib.plan.transfers import WAYS
from shardlib.plan.value import PlanValue
from shardlib.schedules import Action, Kind
from shardlib.schedules.running import run


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, in seconds.

    Attributes:
        total: time from the batch to the next parameters.
        ranks: time each rank along the stages' axis computes; one number for one stage.
        links: axis or way -> time its link is busy, on the rank where it is busiest; "update": time that a host updates;
            "launches": time that operators take however small they are, which is part of the time a rank computes.
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
        bandwidth: bytes per second of one rank: axis -> what it sends; "down" and "up" -> what it moves from its device and
            to it; "read" and "written" -> of states on disk; "update" -> of masters and moments that the host updates.
            "launches" -> operators per second, which ``forward`` then leaves out: each takes that fixed time beside what its
            elements take. They are counted if the plan was traced. What is left out takes no time.
        backward: seconds of backward per second of forward.
        update: seconds of the optimizer on each device.
        owned: predicts a step whose optimizer sums over its axis itself, after backward (1-bit Adam, once frozen).

    Raises:
        MeshError: an axis or a unit that the plan does not have, or ``owned`` where no optimizer owns an axis; an axis with
            the name of a way.

    >>> plan = sl.make_plan({"w": torch.ones(1000, 1000)}, sl.abstract_mesh(data=2), sl.zero(1))
    >>> predicted = sl.report.predict_step(plan, forward=0.001, bandwidth={"data": 1e9})
    >>> round(predicted.total, 3)
    0.007
    """
    plan = plan.everywhere
    units = plan.tiled.units
    ways = (*WAYS, "update", "launches")
    if taken := [axis for axis in plan.sizes if axis in ways]:
        raise MeshError(
            f"the mesh has {axes_named(taken)}, and links have the names {', '.join(ways)}: rename the axis"
        )
    unknown = [f"axis {axis!r}" for axis in bandwidth if axis not in plan.sizes and axis not in ways]
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
) -> list[Rank]:
    """The ranks along the stages' axis, as they are at the end of the step."""
    schedule, owner = plan.stages.schedule, plan.reductions.owner
    ranks = [Rank(bandwidth, owner.axis if owned and owner else None) for _ in range(schedule.ranks)]
    last = {a.stage: a.microbatch for order in schedule.orders for a in order if a.kind in (Kind.B, Kind.W)}
    ready: dict[Action | None, float] = {None: 0.0}  # an action -> when its result has arrived where it is needed

    def visit(rank_number: int, action: Action, need: Action | None) -> None:
        (number, kind, microbatch), rank = action, ranks[rank_number]
        stage, final = stages[number], last[number] == microbatch
        first, later = plan.traces[number].launches if plan.traces else (0, 0)
        rank.now = max(rank.now, ready[need])
        if kind is Kind.F:
            rank.walk(stage.plan, stage.forward, 1.0, first=True, launches=first)
        elif kind is Kind.I:
            rank.walk(stage.plan, stage.backward, backward / 2, launches=later / 2)
        elif kind is Kind.W:
            rank.walk(stage.plan, stage.backward, backward / 2, final, whole=False, launches=later / 2)
        else:
            rank.walk(stage.plan, stage.backward, backward, final, launches=later)
        if kind is not Kind.W:
            result = Action(number, Kind.B if kind is Kind.I else kind, microbatch)
            ready[result] = pass_on(rank, number, kind is Kind.F)

    def pass_on(rank: Rank, stage: int, forwards: bool) -> float:
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
    run_update(plan, ranks, update)
    return ranks

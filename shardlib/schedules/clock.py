"""A schedule on a virtual clock: when each action starts and ends, what idles, and what is held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import Action, Kind, Schedule
from shardlib.schedules.check import check
from shardlib.schedules.running import run

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit of time: one number for all stages, or one per stage.

    ``B`` takes ``input_gradient + weight_gradient``. ``message`` is what passes between the end of an action and
    the moment its result is on another rank, by the stage that sends; it keeps no rank busy, and a result is on
    its own rank at once. Whole numbers and fractions stay exact.
    """

    forward: Cost = 1
    input_gradient: Cost = 1
    weight_gradient: Cost = 1
    message: Cost = 0


class Event(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found: per rank, the events in the order they ran. Time starts at 0."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return max(events[-1].end for events in self.events if events)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.events)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits between time 0 and the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time over busy time, all ranks together.

        With equal ranks this is (makespan − ideal) / ideal, the convention of arXiv 2104.04473: (p−1)/m for 1F1B.
        As a share of the makespan it is bubble / (1 + bubble).
        """
        return sum(self.idle) / sum(self.busy)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most activations held at once: see `in_flight`."""
        return peak_in_flight(self.schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on a virtual clock; every action starts as soon as its rank and its inputs allow.

    Raises:
        ScheduleError: a schedule that cannot run (see `check`), or costs that are negative, all zero, or not
            as many as there are stages.

    >>> timeline = sl.schedules.simulate(sl.schedules.one_f_one_b(2, 4), sl.schedules.Costs(forward=1, message=0))
    >>> max(event.end for rank in timeline.events for event in rank)
    15
    """
    check(schedule)
    table = _per_stage(costs or Costs(), schedule.stages)
    now: list[float] = [0] * schedule.ranks
    ready: dict[Action | None, float] = {None: 0}
    events: list[list[Event]] = [[] for _ in range(schedule.ranks)]

    def visit(rank: int, action: Action, need: Action | None) -> None:
        stage, kind, microbatch = action
        arrival = ready[need]
        if need is not None and schedule.rank_of[need.stage] != rank:
            arrival += table["message"][need.stage]
        start = max(now[rank], arrival)
        now[rank] = end = start + table[kind][stage]
        events[rank].append(Event(action, start, end))
        if kind is not Kind.W:
            ready[action if kind is not Kind.I else Action(stage, Kind.B, microbatch)] = end

    run(schedule, visit)
    return Timeline(schedule, tuple(map(tuple, events)))


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations (of one stage for one micro-batch) that are held at once.

    ``F`` adds one. It is freed when nothing needs it any more: after ``B``, or after ``W`` where the backward is
    split, since weight gradients need the stage's saved inputs. That is the convention in which ZB-H1 holds p
    on every rank and ZB-V 2p halves (arXiv 2401.10241). Divide by the stages per rank for micro-batches' worth.

    >>> sl.schedules.peak_in_flight(sl.schedules.one_f_one_b(4, 8))
    (4, 3, 2, 1)
    """
    return tuple(_peak(order) for order in schedule.orders)


def peak_of_stages(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations it holds at once; freed as in `peak_in_flight`.

    >>> sl.schedules.peak_of_stages(sl.schedules.gpipe(2, 4))
    (4, 4)
    """
    return tuple(
        _peak([action for action in schedule.orders[rank] if action.stage == stage])
        for stage, rank in enumerate(schedule.rank_of)
    )


def _peak(order: Sequence[Action]) -> int:
    held = peak = 0
    for action in order:
        if action.kind is Kind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind is Kind.B or action.kind is Kind.W:
            held -= 1
    return peak


def _per_stage(costs: Costs, stages: int) -> dict[str, Sequence[float]]:
    """Durations by kind of action (and of messages), one per stage."""
    lists: dict[str, Sequence[float]] = {}
    problems = []
    for name in (field.name for field in fields(costs)):
        cost = getattr(costs, name)
        lists[name] = tuple(cost) if isinstance(cost, Sequence) else (cost,) * stages
        if len(lists[name]) != stages:
            problems.append(f"{name} has {len(lists[name])} entries for {stages} stages")
        problems += [f"{name} of stage {s} is {c}" for s, c in enumerate(lists[name]) if not c >= 0]
    if not any(sum(lists[name]) for name in ("forward", "input_gradient", "weight_gradient")):
        problems.append("nothing takes any time")
    if problems:
        raise ScheduleError(
            f"costs do not fit:\n{listing(problems)}\nGive one number, or one per stage, none negative and not all zero."
        )
    inputs, weights = lists["input_gradient"], lists["weight_gradient"]
    return {
        Kind.F: lists["forward"],
        Kind.I: inputs,
        Kind.W: weights,
        Kind.B: tuple(i + w for i, w in zip(inputs, weights)),
        "message": lists["message"],
    }

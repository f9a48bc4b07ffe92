"""A schedule on a virtual clock: when each action starts and ends, how long ranks idle, how much they hold in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from shardlib.common.display.panels import Panel, Shown, Title
from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import Schedule, check, most_held, timed
from shardlib.schedules.events import Event, Kind
from shardlib.schedules.picture import picture

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations of actions, in any unit of time: one number for all stages, or one per stage.

    ``B`` takes ``input_gradient + weight_gradient``. ``message``, given for the stage that sends, is the time from the end
    of an action until its result has arrived on another rank; a message keeps no rank busy. A result is available on the
    rank that computed it at once. Integers and fractions stay exact.
    """

    forward: Cost = 1
    input_gradient: Cost = 1
    weight_gradient: Cost = 1
    message: Cost = 0


@dataclass(frozen=True)
class Timeline(Shown):
    """The result of `simulate`: for each rank its events, in the order they ran. Time starts at 0."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last action ends."""
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
        The idle share of the makespan is bubble / (1 + bubble).
        """
        return sum(self.idle) / sum(self.busy)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most activations held at once: see `shardlib.schedules.peak_in_flight`."""
        return peak_in_flight(self.schedule)

    @property
    def summary(self) -> str:
        """The schedule's name and sizes, how long it takes, what is idle and what is held."""
        schedule, peak = self.schedule, max(self.peak_in_flight)
        held = f"{peak} micro-batches" if schedule.stages == schedule.ranks else f"{peak} chunk activations"
        return (
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches; "
            f"makespan {float(self.makespan):g}, bubble {float(self.bubble):.1%}, at most {held} held"
        )

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show."""
        yield Title(self.summary)
        staged = self.schedule.stages > self.schedule.ranks
        yield picture(self.summary, self.events, staged, "in the units of its costs")


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on a virtual clock. Every action starts as soon as its rank is free and its inputs have arrived.

    Raises:
        ScheduleError: a schedule that cannot run (see `check`), or costs that are negative, all zero, or not
            as many as there are stages.

    >>> timeline = sl.schedules.simulate(sl.schedules.one_f_one_b(2, 4), sl.schedules.Costs(forward=1, message=0))
    >>> max(event.end for rank in timeline.events for event in rank)
    15
    """
    check(schedule)
    return Timeline(schedule, timed(schedule, _per_stage(costs or Costs(), schedule.stages)))


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations (of one stage for one micro-batch) that are held at once.

    ``F`` adds one. ``B`` frees it, or ``W`` where the backward is split, since weight gradients need the stage's saved
    inputs. In this convention ZB-H1 holds p on every rank, and ZB-V 2p halves (arXiv 2401.10241). Divide by the number
    of stages per rank to count in whole micro-batches.

    >>> sl.schedules.peak_in_flight(sl.schedules.one_f_one_b(4, 8))
    (4, 3, 2, 1)
    """
    return tuple(most_held(order) for order in schedule.orders)


def peak_of_stages(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are held at once, counted as in `peak_in_flight`.

    >>> sl.schedules.peak_of_stages(sl.schedules.gpipe(2, 4))
    (4, 4)
    """
    return schedule._most_held


def _per_stage(costs: Costs, stages: int) -> dict[str, Sequence[float]]:
    """Kind of action, or "message" -> durations, one per stage."""
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

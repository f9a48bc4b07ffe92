"""The schedule: one order of actions per rank; whether it can run, and when each action does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from shardlib.common.display.panels import Panel, Paragraph, Shown, Title
from shardlib.errors import ScheduleError, listing
from shardlib.schedules.events import COMPUTE, Action, Event, Kind
from shardlib.schedules.picture import picture


def gives(action: Action) -> Action | None:
    """The result of ``action`` that other stages wait for: an activation ``sFm`` or an input gradient ``sBm``, or None.

    ``I`` gives the same result as ``B``, so that neighbouring stages may mix whole and split backwards.
    """
    if action.kind is Kind.F:
        return action
    if action.kind is Kind.B or action.kind is Kind.I:
        return Action(action.stage, Kind.B, action.microbatch)
    return None


def needs(action: Action, stages: int) -> Action | None:
    """The result of a neighbouring stage (see `gives`) that ``action`` waits for, or None."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return Action(stage - 1, Kind.F, microbatch) if stage else None
    if (kind is Kind.B or kind is Kind.I) and stage < stages - 1:
        return Action(stage + 1, Kind.B, microbatch)
    return None


@dataclass(frozen=True)
class Schedule(Shown):
    """The actions of every rank, in order: a value, made by a pure function and interpreted by an executor.

    The constructor does not check that the orders can run; `check` does.

    Attributes:
        ranks: p.
        stages: p·v, where every rank has v stages.
        microbatches: m.
        rank_of: the rank of each stage.
        orders: the compute actions (``F``, ``B``, ``I``, ``W``) of each rank.

    Raises:
        ScheduleError: sizes that contradict each other, or a rank without a stage; lists all of them.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        problems = [
            f"{what} is {value}, and at least 1 is needed"
            for what, value in (("ranks", self.ranks), ("stages", self.stages), ("microbatches", self.microbatches))
            if value < 1
        ]
        if len(self.orders) != self.ranks:
            problems.append(f"{len(self.orders)} orders for {self.ranks} ranks")
        if len(self.rank_of) != self.stages:
            problems.append(f"rank_of has {len(self.rank_of)} entries for {self.stages} stages")
        owners = set(self.rank_of)
        problems += [f"rank {rank} has no stage" for rank in range(self.ranks) if rank not in owners]
        problems += [
            f"stage {stage} is on rank {rank}, which is none of the {self.ranks} ranks"
            for stage, rank in enumerate(self.rank_of)
            if not 0 <= rank < self.ranks
        ]
        if problems:
            raise ScheduleError(
                f"schedule {self.name!r} is malformed:\n{listing(problems)}\n"
                "Give one order per rank, and in rank_of one rank per stage."
            )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank``, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @cached_property  # as what follows: plans of many stages ask for each of them
    def splits(self) -> bool:
        """Whether any backward is split into ``I`` and ``W``."""
        return any(action.kind is Kind.I or action.kind is Kind.W for order in self.orders for action in order)

    @cached_property
    def _most_held(self) -> tuple[int, ...]:
        return tuple(
            most_held([action for action in self.orders[rank] if action.stage == stage])
            for stage, rank in enumerate(self.rank_of)
        )

    def __str__(self) -> str:
        """A table, one row per rank. Actions are shown without their stage if stage r is the only one of every rank r."""
        one_each = self.rank_of == tuple(range(self.ranks))
        chunks = "" if one_each else f" stages={self.stages}"
        rows = [f"{self.name} p={self.ranks} m={self.microbatches}{chunks}"]
        for rank, order in enumerate(self.orders):
            cells = [f"{a.kind}{a.microbatch}" if one_each and a.stage == rank else str(a) for a in order]
            rows.append(" ".join([f"r{rank}", *cells]))
        return "\n".join(rows)

    def shown(self) -> Iterator[Panel]:
        """Its timeline where F, I and W take equal times, or why it cannot run."""
        yield Title(
            f"Schedule {self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} micro-batches"
        )
        try:
            check(self)
        except ScheduleError as error:
            yield Paragraph(str(error), code=True)
        else:
            yield picture(
                f"schedule {self.name}", timed(self, _UNITS), self.stages > self.ranks, "in forwards of a stage"
            )


_UNITS: Mapping[str, float] = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, "message": 0}


def most_held(order: Iterable[Action]) -> int:
    """The most activations, of a stage for a micro-batch, that are held at once by a rank that acts in this order."""
    held = peak = 0
    for action in order:
        if action.kind is Kind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind is Kind.B or action.kind is Kind.W:
            held -= 1
    return peak


def from_orders(orders: Iterable[Sequence[Action]], name: str = "custom") -> Schedule:
    """A schedule from ``orders``, one list of compute actions per rank.

    The numbers of stages and micro-batches follow from the largest that occur, and a stage belongs to the rank that runs
    its first forward.

    Raises:
        ScheduleError: an entry that is not a compute action, or a stage without a forward; lists all of them.

    >>> schedule = sl.schedules.gpipe(2, 2)
    >>> sl.schedules.from_orders(schedule.orders).orders == schedule.orders
    True
    """
    rows = tuple(tuple(order) for order in orders)
    problems = [
        f"rank {rank}, position {position}: {entry!s} is not a compute action"
        for rank, row in enumerate(rows)
        for position, entry in enumerate(row)
        if not isinstance(entry, Action) or entry.kind not in COMPUTE or min(entry.stage, entry.microbatch) < 0
    ]
    if problems:
        raise ScheduleError(
            f"schedule {name!r} is malformed:\n{listing(problems)}\n"
            "Write Action(stage, kind, microbatch), numbers from 0, with kind F, B, I or W; lower() adds the messages."
        )
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind is Kind.F:
                owners.setdefault(action.stage, rank)
    actions = [action for row in rows for action in row]
    stages = 1 + max((action.stage for action in actions), default=-1)
    homeless = [f"no rank runs a forward of stage {stage}" for stage in range(stages) if stage not in owners]
    if homeless or not actions:
        raise ScheduleError(
            f"schedule {name!r} is malformed:\n{listing(homeless or ['it has no actions'])}\n"
            "Every stage from 0 to the last needs a forward for every micro-batch."
        )
    return Schedule(
        name=name,
        ranks=len(rows),
        stages=stages,
        microbatches=1 + max(action.microbatch for action in actions),
        rank_of=tuple(owners[stage] for stage in range(stages)),
        orders=rows,
    )


# Whether a schedule can run: every action once, on the right rank, in a possible order, and without deadlock.


# Running the orders of a schedule as communicating processes: sends never wait, receives do.


Visit = Callable[[int, Action, Action | None], None]


def run(schedule: Schedule, visit: Visit | None = None) -> list[int]:
    """Run every rank until it ends or waits for ever; returns the position in its order at which each rank stopped.

    A rank that finishes stops at the length of its order. ``visit(rank, action, needs(action))`` is called for every
    action that runs, after the actions that it depends on. The result does not depend on how ranks are interleaved, since
    ranks interact only by waiting. Takes time linear in the number of actions.
    """
    at = [0] * schedule.ranks
    made: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        order = schedule.orders[rank]
        while at[rank] < len(order):
            action = order[at[rank]]
            need = needs(action, schedule.stages)
            if need is not None and need not in made:
                waiting.setdefault(need, []).append(rank)
                break
            at[rank] += 1
            if visit is not None:
                visit(rank, action, need)
            result = gives(action)
            if result is not None:
                made.add(result)
                runnable += waiting.pop(result, ())
    return at


def timed(schedule: Schedule, cost: Mapping[str, Any]) -> tuple[tuple[Event, ...], ...]:
    """For each rank its actions with their times: each starts as soon as its rank is free and its inputs have arrived.

    Args:
        cost: kind of action, or "message" -> duration, of every stage or one for each.
    """
    now: list[float] = [0] * schedule.ranks
    ready: dict[Action | None, float] = {None: 0}
    events: list[list[Event]] = [[] for _ in range(schedule.ranks)]

    def of(name: str, stage: int) -> float:
        return cost[name][stage] if isinstance(cost[name], Sequence) else cost[name]

    def visit(rank: int, action: Action, need: Action | None) -> None:
        stage, kind, microbatch = action
        arrival = ready[need]
        if need is not None and schedule.rank_of[need.stage] != rank:
            arrival += of("message", need.stage)
        start = max(now[rank], arrival)
        now[rank] = end = start + of(kind, stage)
        events[rank].append(Event(action, start, end))
        if kind is not Kind.W:
            ready[action if kind is not Kind.I else Action(stage, Kind.B, microbatch)] = end

    run(schedule, visit)
    return tuple(map(tuple, events))


Positions = dict[Action, list[tuple[int, int]]]


def check(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run.

    Every stage needs, for every micro-batch, one ``F`` and then one ``B``, or one ``I`` and then one ``W``, on the
    rank that owns the stage. Deadlocks are found by running the orders as processes that wait at receives only.

    Raises:
        ScheduleError: lists every missing, unknown, repeated or misplaced action, and every cycle of ranks that
            wait for each other ("deadlock: rank 0 waits at 0B1 for 1B1, ...").

    >>> sl.schedules.check(sl.schedules.one_f_one_b(2, 4))
    """
    positions: Positions = {}
    for rank, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            positions.setdefault(action, []).append((rank, position))
    problems = [*_misplaced(schedule, positions), *_incomplete(schedule, positions), *_deadlocks(schedule)]
    if problems:
        raise ScheduleError(
            f"schedule {schedule.name!r} cannot run:\n{listing(problems)}\n"
            "Give every stage and micro-batch one F, then one B or one I and one W, on its rank, without cycles of waiting."
        )


def _misplaced(schedule: Schedule, positions: Positions) -> Iterator[str]:
    for action, runs in positions.items():
        rank = runs[0][0]
        if action.kind not in COMPUTE:
            yield f"rank {rank}: {action} is a message; orders hold compute actions, and lower() adds the messages"
        elif not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
            yield (
                f"rank {rank}: {action} is outside the {schedule.stages} stages "
                f"and {schedule.microbatches} micro-batches"
            )
        else:
            owner = schedule.rank_of[action.stage]
            strangers = sorted({rank for rank, _ in runs} - {owner})
            if strangers:
                ranks = ", ".join(map(str, strangers))
                yield f"rank {ranks} runs {action}, but stage {action.stage} is on rank {owner}"
        if len(runs) > 1:
            listed = ", ".join(f"rank {rank} position {position}" for rank, position in runs)
            yield f"{action} is run {len(runs)} times: {listed}"


def _incomplete(schedule: Schedule, positions: Positions) -> Iterator[str]:
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.microbatches):
            forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in COMPUTE)
            split = inputs in positions or weights in positions
            if split and whole in positions:
                half = inputs if inputs in positions else weights
                yield f"rank {rank} runs both {whole} and {half}; a backward is whole (B) or split (I and W)"
            chain = [forward, inputs, weights] if split else [forward, whole]
            yield from (f"rank {rank} never runs {action}" for action in chain if action not in positions)
            for earlier, later in pairwise(chain):
                if earlier in positions and later in positions:
                    (rank_of_earlier, first), (rank_of_later, second) = positions[earlier][0], positions[later][0]
                    if rank_of_earlier == rank_of_later and second < first:
                        yield f"rank {rank_of_later} runs {later} (position {second}) before {earlier} (position {first})"


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    """One line for each cycle of ranks that wait for each other.

    A rank that waits for an action that no rank runs is not in a cycle: `_incomplete` reports the missing action.
    """
    stopped = run(schedule)
    stuck = {rank: at for rank, at in enumerate(stopped) if at < len(schedule.orders[rank])}
    makers: dict[Action, tuple[int, Action]] = {}
    for rank, at in stuck.items():
        for action in schedule.orders[rank][at:]:
            result = gives(action)
            if result is not None:
                makers.setdefault(result, (rank, action))

    def waits_for(rank: int) -> tuple[Action, tuple[int, Action] | None]:
        action = schedule.orders[rank][stuck[rank]]
        need = needs(action, schedule.stages)
        assert need is not None, "a rank only ever stops at an action that needs something"
        return action, makers.get(need)

    def message(rank: int) -> str:
        action, maker = waits_for(rank)
        assert maker is not None, "a rank in a cycle waits for another one"
        other, wanted = maker
        return f"rank {rank} waits at {action} for {wanted}, which rank {other} runs after {waits_for(other)[0]}"

    # A stuck rank waits for at most one other rank. So a walk from each rank to the one it waits for finds every cycle.
    seen: set[int] = set()
    for start in stuck:
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            maker = waits_for(rank)[1]
            if maker is None:
                break
            rank = maker[0]
        else:
            if rank in path:
                yield "deadlock: " + "; ".join(message(rank) for rank in path[path.index(rank) :])

"""Whether a schedule can run: every action once, on the right rank, in a possible order, and without deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import COMPUTE, Action, Schedule, gives, needs

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
            "Give every stage and micro-batch one F, then one B or one I and one W, on the rank that owns the stage, "
            "in orders in which no ranks wait for each other."
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

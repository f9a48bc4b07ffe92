"""Running the orders of a schedule as communicating processes: sends never wait, receives do."""

from collections.abc import Callable

from shardlib.schedules.actions import Action, Schedule, gives, needs

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

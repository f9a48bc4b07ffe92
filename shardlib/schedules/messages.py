"""Messages: where in the orders of a schedule they are sent and received, and by which tags they are distinguished."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardlib.errors import ScheduleError
from shardlib.schedules.actions import Schedule, check, gives, needs, run
from shardlib.schedules.events import COMPUTE, Action, Kind

SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
RECEIVES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}
_FORWARD = (Kind.SEND_F, Kind.RECV_F)


def lower(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The orders of a schedule with messages added, one order per rank.

    ``sSEND_Fm`` follows the forward of stage s whose activation it sends to stage s+1, and ``sRECV_Fm`` precedes
    the forward of stage s that needs the activation; ``sSEND_Bm`` and ``sRECV_Bm`` carry input gradients from s to s−1
    and from s+1 to s. Stages on one rank exchange no messages.

    Between two ranks, in one direction, messages are received in the order in which they are sent, so a transport
    needs no tags. A receive therefore stands right before the action that needs the message, or earlier where a later
    message of the same sender is needed first; that causes no delay, since the earlier message arrives earlier. If sends
    do not block, the lowered orders run without deadlock.

    Raises:
        ScheduleError: a schedule that cannot run, see `check`.

    >>> print(*sl.schedules.lower(sl.schedules.gpipe(2, 1))[0])
    0F0 0SEND_F0 0RECV_B0 0B0
    """
    check(schedule)
    lowered: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    # (sender, receiver) -> the receives of messages that are sent and not yet received, oldest first.
    under_way: dict[tuple[int, int], deque[Action]] = {}

    def visit(rank: int, action: Action, need: Action | None) -> None:
        if need is not None and schedule.rank_of[need.stage] != rank:
            queue = under_way[schedule.rank_of[need.stage], rank]
            receive = Action(action.stage, RECEIVES[need.kind], action.microbatch)
            if receive in queue:
                while (first := queue.popleft()) != receive:
                    lowered[rank].append(first)
                lowered[rank].append(receive)
        lowered[rank].append(action)
        result = gives(action)
        if result is None:
            return
        stage = action.stage + 1 if result.kind is Kind.F else action.stage - 1
        if 0 <= stage < schedule.stages and schedule.rank_of[stage] != rank:
            lowered[rank].append(Action(action.stage, SENDS[result.kind], action.microbatch))
            queue = under_way.setdefault((rank, schedule.rank_of[stage]), deque())
            queue.append(Action(stage, RECEIVES[result.kind], action.microbatch))

    run(schedule, visit)
    return tuple(map(tuple, lowered))


def acknowledged(schedule: Schedule, orders: Sequence[Sequence[Action]], rank: int) -> dict[Action, list[Action]]:
    """For each receive of ``rank``, the sends of ``rank`` that must have arrived by the time the receive completes.

    A message that another rank sends after it has used one of this rank's messages proves that this message arrived, so
    that its memory may be freed.

    Args:
        orders: the schedule's lowered orders.

    >>> schedule = sl.schedules.one_f_one_b(2, 2)
    >>> sent = sl.schedules.acknowledged(schedule, sl.schedules.lower(schedule), 0)
    >>> sorted((str(receive), [str(send) for send in sends]) for receive, sends in sent.items())
    [('0RECV_B0', ['0SEND_F0']), ('0RECV_B1', ['0SEND_F1'])]
    """
    acknowledgements: dict[Action, list[Action]] = {}
    for order in orders:
        following: Action | None = None  # this rank's receive of the next message that the order's rank sends to it
        for action in reversed(order):
            if action.kind in SENDS.values():
                stage, to = _stages(action)
                if schedule.rank_of[to] == rank:
                    kind = Kind.RECV_F if to > stage else Kind.RECV_B
                    following = Action(to, kind, action.microbatch)
                continue
            need = needs(action, schedule.stages) if action.kind in COMPUTE else None
            if following and need and schedule.rank_of[need.stage] == rank != schedule.rank_of[action.stage]:
                send = Action(need.stage, SENDS[need.kind], need.microbatch)
                acknowledgements.setdefault(following, []).append(send)
    return acknowledgements


def peer(schedule: Schedule, message: Action) -> int:
    """The rank that a send goes to, or that a receive comes from.

    >>> schedule = sl.schedules.gpipe(2, 1)
    >>> message = next(action for action in sl.schedules.lower(schedule)[0] if "SEND" in str(action))
    >>> str(message), sl.schedules.peer(schedule, message)
    ('0SEND_F0', 1)
    """
    return schedule.rank_of[_stages(message)[message.kind in SENDS.values()]]


def tag(schedule: Schedule, message: Action) -> int:
    """The tag of a message: a number that its send and its receive share, and no other message of the schedule has.

    Tags lie between 0 and 2·(stages−1)·microbatches − 1.

    >>> schedule = sl.schedules.gpipe(2, 1)
    >>> sends = [a for order in sl.schedules.lower(schedule) for a in order if "SEND" in str(a)]
    >>> [sl.schedules.tag(schedule, send) for send in sends]
    [0, 1]
    """
    boundary = min(_stages(message))
    return (boundary * schedule.microbatches + message.microbatch) * 2 + (message.kind not in _FORWARD)


def _stages(message: Action) -> tuple[int, int]:
    """The stages that a message goes from and to."""
    stage, kind, _ = message
    if kind in SENDS.values():
        return stage, stage + 1 if kind is Kind.SEND_F else stage - 1
    if kind in RECEIVES.values():
        return stage - 1 if kind is Kind.RECV_F else stage + 1, stage
    raise ScheduleError(f"{message} is not a message; messages are SEND_F, RECV_F, SEND_B and RECV_B")

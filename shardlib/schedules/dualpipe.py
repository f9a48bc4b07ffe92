"""DualPipeV, half of DualPipe: stages as in ZB-V, with whole backwards where they hide communication."""

from __future__ import annotations

from collections import deque

from shardlib.schedules.actions import Schedule
from shardlib.schedules.events import Action, Kind
from shardlib.schedules.generators import Step, at_least_one, schedule_of


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV ("dualpipe-v"): rank r has stages r and 2p−1−r, as in `zbv`, and alternates forwards and backwards.

    The schedule has one of the two directions of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). In its steady
    state a forward of one chunk is next to a whole backward of the other, so that messages of one overlap with computation
    of the other; backwards are split where a rank would idle. In the times of one chunk, for m ≥ 2p, the bubble is
    (p−1)F where F = I = W. Where W ≤ min(F, I) it is at most the published (p−1)(F&B + B − 3W), with F&B = F + B here. No
    rank holds more than p and a half micro-batches (2p+1 halves) at its peak.

    >>> sl.schedules.dualpipe_v(2, 4).stages
    4
    """
    at_least_one(p=p, m=m)
    # The pattern needs 2p micro-batches. For fewer, the others are taken out of it, as in `zbv`.
    whole = max(m, 2 * p)
    stages = [(rank, 2 * p - 1 - rank) for rank in range(p)]
    orders = [[a for a in _numbered(_steps(rank, p, whole), stages[rank]) if a.microbatch < m] for rank in range(p)]
    return schedule_of("dualpipe-v", m, (*range(p), *reversed(range(p))), orders)


def _steps(rank: int, p: int, m: int) -> list[Step]:
    """The steps of a rank. ``W`` stands for the weight gradient of the oldest ``I`` without one, of either chunk."""
    f0, f1, b0, b1 = ((chunk, kind) for kind in (Kind.F, Kind.B) for chunk in (0, 1))
    i0, i1, w = (0, Kind.I), (1, Kind.I), (0, Kind.W)
    below = p - 1 - rank  # ranks between this one and the turn of the V
    # Forwards of chunk 0 until the first micro-batch comes back up the V; forwards of both chunks in turn; then the first
    # backwards of chunk 1, between its last warm-up forwards.
    steps = [f0] * (2 * below) + [f0, f1] * (rank + 1) + [i1, w, f1] * below
    steps += [f0, b1, f1, b0] * (m - 2 * p + rank + 1)
    # No micro-batch enters any more, then none comes back up. At the end weight gradients fill idle time.
    steps += [b1, f1, b0] * below
    steps += ([b1, b0] * (rank + 1))[: rank + 1] + ([i1, i0] * (rank + 1))[rank + 1 :]
    return steps + [w, i0] * below + [w] * (rank + 1)


def _numbered(steps: list[Step], stages: tuple[int, int]) -> list[Action]:
    """Actions from steps. A chunk's forwards take the micro-batches in turn, and so do its backwards, whole or split."""
    forwards, backwards = [0, 0], [0, 0]
    late: deque[Action] = deque()
    actions = []
    for chunk, kind in steps:
        if kind is Kind.W:
            actions.append(late.popleft())
            continue
        following = forwards if kind is Kind.F else backwards
        actions.append(Action(stages[chunk], kind, following[chunk]))
        if kind is Kind.I:
            late.append(Action(stages[chunk], Kind.W, following[chunk]))
        following[chunk] += 1
    return actions

"""The published schedules, as pure functions of the numbers of ranks p, micro-batches m and chunks v.

Times are for one rank's share of the model: a forward F, an input gradient I, a weight gradient W, and B = I + W; a chunk
takes a v-th of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardlib.errors import ScheduleError
from shardlib.schedules.actions import Schedule
from shardlib.schedules.events import Action, Kind

Step = tuple[int, Kind]  # (chunk, what to do with the chunk's next micro-batch)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    The bubble is (p−1)(F+B), and every rank holds m micro-batches at its peak.

    >>> print(sl.schedules.write_table(sl.schedules.gpipe(2, 2)))
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    """
    at_least_one(p=p, m=m)
    orders = [
        [Action(rank, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(m)] for rank in range(p)
    ]
    return schedule_of("gpipe", m, tuple(range(p)), orders)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Forwards and backwards in turn, after a warm-up of min(p−1−r, m) forwards ("1f1b").

    The non-interleaved schedule of arXiv 2104.04473, section 2.2.1. The bubble is (p−1)(F+B), as in GPipe, but
    rank r holds only min(p−r, m) micro-batches.

    >>> print(sl.schedules.write_table(sl.schedules.one_f_one_b(2, 3)))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    return _in_rounds("1f1b", p, m, chunks=1, hop=1)


def interleaved_1f1b(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B over v chunks per rank, stage = chunk·p + r (arXiv 2104.04473, section 2.2.2).

    Micro-batches pass in rounds: a round passes all chunks before the next round starts. For m ≥ p the bubble is
    (p−1)(F+B)/v; rank 0 holds up to p + (p−1)/v micro-batches where p divides m. Where p does not divide m there are
    ⌊m/p⌋ rounds, none shorter than p and the longer ones first: the bubble is no larger, some ranks hold more.
    For m < p the single round is too short to keep all ranks busy, and the makespan is (pv+m−1)(F+B)/v.
    With one chunk this is plain 1F1B.

    >>> sl.schedules.interleaved_1f1b(2, 4).rank_of
    (0, 1, 0, 1)
    """
    return _in_rounds("interleaved-1f1b", p, m, chunks=v, hop=1 if v == 1 else 2)


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """All forwards of a rank's first chunk, then of its next chunk, and so on; then all backwards ("looped-bfs").

    Breadth-first over v chunks per rank (arXiv 2211.05953, section 4), with stage = chunk·p + r. Backwards run in reverse
    order: last chunk and last micro-batch first. For m ≥ p the bubble is (p−1)(F+B)/v, and every rank holds m micro-batches
    at its peak, as in GPipe.

    >>> print(sl.schedules.write_table(sl.schedules.looped_bfs(2, 2)))
    0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0
    1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0
    """
    at_least_one(p=p, m=m, v=v)
    orders = [
        [Action(chunk * p + rank, Kind.F, microbatch) for chunk in range(v) for microbatch in range(m)]
        + [
            Action(chunk * p + rank, Kind.B, microbatch)
            for chunk in reversed(range(v))
            for microbatch in reversed(range(m))
        ]
        for rank in range(p)
    ]
    return schedule_of("looped-bfs", m, tuple(range(p)) * v, orders)


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """1F1B with a split backward whose weight gradients fill the bubble ("zb-h1"; arXiv 2401.10241).

    Rank r delays its weight gradients by r micro-batches, so that every rank holds p micro-batches at its peak
    (until their weight gradients are done), as rank 0 does in 1F1B. For m ≥ p the bubble is
    (p−1)(F+I−W) where W ≤ min(F, I), and (p−1)·max(F, I) where W is longer.

    >>> sl.schedules.zero_bubble_h1(2, 4).name
    'zb-h1'
    """
    return _in_rounds("zb-h1", p, m, chunks=1, hop=1, split=True)


def interleaved_zero_bubble(p: int, m: int, v: int = 2) -> Schedule:
    """ZB-H1 over v chunks per rank ("interleaved-zb"), in the rounds of `interleaved_1f1b`.

    After arXiv 2401.10241 and 2104.04473. For m ≥ p the bubble is that of ZB-H1 divided by v: (p−1)(F+I−W)/v where
    W ≤ min(F, I).

    >>> sl.schedules.interleaved_zero_bubble(2, 4).stages
    4
    """
    return _in_rounds("interleaved-zb", p, m, chunks=v, hop=1, split=True)


def zbv(p: int, m: int) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): rank r has stages r and 2p−1−r, so that the last stage sits on rank 0.

    For m ≥ 2p−1 and F = I = W no rank idles between its first and its last action, and the bubble, (p−1)F/2, is the
    ranks' staggered start; for fewer micro-batches it is max(p−1, 4(p−1) − 2(m−1))·F/2. No rank holds more
    than p micro-batches (2p halves) at its peak.

    >>> sl.schedules.zbv(2, 4).rank_of
    (0, 1, 1, 0)
    """
    at_least_one(p=p, m=m)
    # The pattern needs 2p−1 micro-batches. For fewer, the others are taken out of it. That keeps the order valid, since
    # actions depend only on actions of the same micro-batch.
    whole = max(m, 2 * p - 1)
    f0, i0, w0 = ((0, kind) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = ((1, kind) for kind in (Kind.F, Kind.I, Kind.W))
    orders = []
    for rank in range(p):
        # Forwards down the V until the first micro-batch comes back up; then both chunks' forwards in turn until its
        # backward arrives.
        steps: list[Step] = [f0] * (2 * (p - rank) - 1) + [f1, f0] * rank + [f1, i1, w1] * (p - rank)
        steps += [f0, i0, w0, f1, i1, w1] * (whole - (2 * p - 1 - rank))
        steps += [i0, w0, f1, i1, w1] * (p - 1 - rank)
        # Backwards only: input gradients while other ranks wait for them, weight gradients in the time left.
        steps += [i0, i1] * rank + [i0, w0] * (p - rank) + [w1] * rank + [w0] * rank
        orders.append([a for a in _numbered(steps, (rank, 2 * p - 1 - rank)) if a.microbatch < m])
    return schedule_of("zb-v", m, (*range(p), *reversed(range(p))), orders)


def _in_rounds(name: str, p: int, m: int, chunks: int, hop: int, split: bool = False) -> Schedule:
    """A schedule of warm-up forwards, then forwards and backwards in turn, then the remaining backwards.

    Every rank runs the same sequence of (chunk, micro-batch) forwards and the same sequence of backwards. Rank r starts
    its backwards ``hop`` forwards later than rank r + 1. With ``split`` rank r runs the weight gradient of a micro-batch
    r input gradients after that micro-batch's input gradient.
    """
    at_least_one(p=p, m=m, v=chunks)
    rounds = _rounds(p, m)
    forwards = [(chunk, i) for members in rounds for chunk in range(chunks) for i in members]
    backwards = [(chunk, i) for members in rounds for chunk in reversed(range(chunks)) for i in members]
    orders = []
    for rank in range(p):
        # The last rank must run the whole first round of all chunks but the last one.
        warmup = min((chunks - 1) * len(rounds[0]) + hop * (p - 1 - rank), len(forwards))
        order = [Action(chunk * p + rank, Kind.F, i) for chunk, i in forwards[:warmup]]
        for k, (chunk, i) in enumerate(backwards):
            if warmup + k < len(forwards):
                ahead, j = forwards[warmup + k]
                order.append(Action(ahead * p + rank, Kind.F, j))
            order.append(Action(chunk * p + rank, Kind.I if split else Kind.B, i))
            if split and k >= rank:
                late, j = backwards[k - rank]
                order.append(Action(late * p + rank, Kind.W, j))
        if split:
            order += [Action(c * p + rank, Kind.W, i) for c, i in backwards[max(len(backwards) - rank, 0) :]]
        orders.append(order)
    return schedule_of(name, m, tuple(range(p)) * chunks, orders)


def _rounds(p: int, m: int) -> list[range]:
    """Micro-batches in rounds of at least p; in one round if m < p.

    Longer rounds come first: the warm-up covers the first round, and a longer round after it would leave ranks idle.
    """
    count = max(m // p, 1)
    short, extra = divmod(m, count)
    ends = [(k + 1) * short + min(k + 1, extra) for k in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _numbered(steps: Iterable[Step], stages: Sequence[int]) -> list[Action]:
    """Actions from steps. The steps of one (chunk, kind) take the micro-batches in turn."""
    following: dict[Step, int] = {}
    actions = []
    for chunk, kind in steps:
        microbatch = following.get((chunk, kind), 0)
        following[chunk, kind] = microbatch + 1
        actions.append(Action(stages[chunk], kind, microbatch))
    return actions


def schedule_of(name: str, m: int, rank_of: tuple[int, ...], orders: list[list[Action]]) -> Schedule:
    """A schedule of ``orders``, with the numbers of ranks and stages taken from the lists' lengths."""
    return Schedule(name, len(orders), len(rank_of), m, rank_of, tuple(map(tuple, orders)))


def at_least_one(**sizes: int) -> None:
    """Refuse numbers of ranks (p), micro-batches (m) or chunks (v) below 1."""
    words = {"p": "ranks", "m": "micro-batches", "v": "chunks per rank"}
    wrong = [f"{words[name]} {name}={size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise ScheduleError(f"a schedule needs at least one of each, but {', '.join(wrong)}; give positive numbers")

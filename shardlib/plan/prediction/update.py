"""The update of a predicted step: on the device, and in the memories of states that are not there."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.mesh.memories import AHEAD, MEMORIES, WRITING
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import tied_bytes
from shardlib.plan.prediction.rank import Rank
from shardlib.plan.transfers import stores
from shardlib.plan.value import PlanValue

_SLOTS = 2  # groups of new parameters that are on their way at once


def run_update(plan: PlanValue, ranks: Sequence[Rank], seconds: float) -> None:
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
        rank.compute(seconds)
        here = [bucket for bucket in view.trained if bucket.memory.optimizer == "device"]
        stored = [_stored(view, rank, bucket, rank.now)[1] for bucket in here]
        rank.now = max([rank.now, *stored, _elsewhere(view, rank, start)])


def _elsewhere(view: PlanValue, rank: Rank, start: float) -> float:
    """The end of the host's updates: bucket by bucket, in the order in which gradients land.

    States on disk are read ahead and written behind, in memory for a few buckets, and the step ends when all are written.
    New parameters go up from slots that take turns.
    """
    buckets = [bucket for bucket in reversed(view.trained) if bucket.memory.optimizer != "device"]
    size = _state_bytes(view, buckets)
    updated, ends = [start], [start]
    sent: list[float] = []
    written: list[float] = []
    for number, bucket in enumerate(buckets):
        ready = max(updated[-1], *(rank.landed.get(tile.name, start) for tile in bucket.cut))
        if number >= _SLOTS:
            ready = max(ready, sent[number - _SLOTS])
        rests = MEMORIES[bucket.memory.optimizer].rests
        if rests:
            asked = updated[max(0, number - AHEAD)]
            if number >= AHEAD + 1 + WRITING:
                asked = max(asked, written[number - AHEAD - 1 - WRITING])
            ready = max(ready, rank.send("read", size[bucket.name], asked))
        updated.append(rank.send("update", size[bucket.name], ready))
        written.append(rank.send("written", size[bucket.name] if rests else 0, updated[-1]))
        moved, stored = _stored(view, rank, bucket, updated[-1])
        sent.append(moved)
        ends.append(max(stored, written[-1]))
    return max(ends)


def _stored(view: PlanValue, rank: Rank, bucket: Bucket, ready: float) -> tuple[float, float]:
    """When a bucket's new parameters have left the optimizer's memory, and when they are stored."""
    first, last = stores(bucket)
    moved = ready
    if first is not None:
        moved = rank.send(first.axis, first.bytes, ready)
    done = rank.along(view.routes[bucket.name].restore, moved)
    return moved, done if last is None else rank.send(last.axis, last.bytes, done)


def _state_bytes(view: PlanValue, buckets: Sequence[Bucket]) -> dict[str, float]:
    """Bucket name -> bytes of its masters and moments, in proportion to its elements."""
    held = {memory: count for needs in view.needs or () for memory, count in needs.bytes.items()}
    elements = {memory: sum(b.owned for b in buckets if b.memory.optimizer == memory) for memory in held}
    return {
        bucket.name: held.get(bucket.memory.optimizer, 0)
        / MEMORIES[bucket.memory.optimizer].slots
        * bucket.owned
        / max(1, elements.get(bucket.memory.optimizer, 1))
        for bucket in buckets
    }

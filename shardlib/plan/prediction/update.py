"""The update of a predicted step: on the device, and in the memories of states that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import AHEAD, MEMORIES, WRITING
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import tied_bytes
from shardlib.plan.prediction.rank import Rank
from shardlib.plan.records import OptimizerNeeds
from shardlib.plan.transfers import files, stores
from shardlib.plan.value import PlanValue

_SLOTS = 2  # groups of new parameters that are on their way at once


def run_update(plan: PlanValue, ranks: Sequence[Rank], seconds: Sequence[float]) -> None:
    """The update, which starts when every rank has its gradients, and the gathers after it.

    Args:
        seconds: of the update on each rank's device.
    """
    for rank in ranks:
        rank.now = max(rank.now, rank.reduced)
    for axis in plan.stages.axes:
        for bucket in plan.trained:
            count = (len(bucket.homes) - 1) * tied_bytes(bucket)
            for rank in (ranks[home] for home in bucket.homes):
                rank.now = rank.send(axis, count, rank.now)
    start = max(rank.now for rank in ranks)
    for view, rank, taken in zip(plan.views, ranks, seconds, strict=True):
        rank.now = start
        rank.compute(rank.rates.overheads.step + len(view.trained) * rank.rates.overheads.bucket)
        for axis in view.loss_axes:  # the loss, the norm and the flags, in one message
            rank.now += rank.rates.link(axis, sums=True).latency
        if rank.owned is not None:
            means = [view.routes[bucket.name].mean for bucket in view.trained]
            rank.now = rank.send(rank.owned, sum(mean.payload for mean in means if mean), rank.now)
        for axis, sent in view.needs[0].payload.items() if view.needs else ():
            rank.now = rank.send(axis, sent, rank.now)
        rank.compute(taken)
        here = [bucket for bucket in view.trained if bucket.memory.optimizer == "device"]
        read = [rank.send("read", files(bucket).get("read", 0), start) for bucket in here]
        rank.now = max([rank.now, *read])
        stored = [_stored(view, rank, bucket, rank.now)[1] for bucket in here]
        rank.now = max([rank.now, *stored, _elsewhere(view, rank, start)])


def _elsewhere(view: PlanValue, rank: Rank, start: float) -> float:
    """The end of the host's updates: bucket by bucket, in the order in which gradients land.

    States on disk are read ahead and written behind, in memory for a few buckets, and the step ends when all are written.
    New parameters go up from slots that take turns. Updates that run ahead begin before ``start``: as gradients land, or at
    once where they are those of the step before. They have memory of their own, and what they make goes up from ``start``,
    once all are made.
    """
    buckets = [bucket for bucket in reversed(view.trained) if bucket.memory.optimizer != "device"]
    updates, moves = (_shares(view, buckets, of) for of in (_updated, _moved))
    ahead, delayed = view.step.ahead, view.step.update == "delay"
    arrived = {bucket.name: max(rank.landed.get(tile.name, start) for tile in bucket.cut) for bucket in buckets}
    updated = [0.0 if ahead else start]
    sent: list[float] = []
    written: list[float] = []
    ends = [start, *arrived.values()]
    for number, bucket in enumerate(buckets):
        ready = updated[-1] if delayed else max(updated[-1], arrived[bucket.name])
        if number >= _SLOTS and not ahead:
            ready = max(ready, sent[number - _SLOTS])
        if MEMORIES[bucket.memory.optimizer].rests:
            asked = updated[max(0, number - AHEAD)]
            if number >= AHEAD + 1 + WRITING:
                asked = max(asked, written[number - AHEAD - 1 - WRITING])
            ready = max(ready, rank.send("read", moves[bucket.name], asked))
            if MEMORIES[bucket.memory.grad].rests:
                gradient = whole_blocks(bucket.owned * bucket.reduce_dtype.itemsize)
                ready = max(ready, rank.send("read", gradient, max(asked, arrived[bucket.name])))
            ready = max(ready, rank.send("read", files(bucket).get("read", 0), asked))
        updated.append(rank.send("update", updates[bucket.name], ready))
        if not ahead:
            moved, stored = _stored(view, rank, bucket, updated[-1])
            sent.append(moved)
            ends.append(stored)
        written.append(rank.send("written", moves[bucket.name], updated[-1]))
        ends.append(written[-1])
    if ahead:
        ends += [_stored(view, rank, bucket, max(start, updated[-1]))[1] for bucket in buckets]
    return max(ends)


def _stored(view: PlanValue, rank: Rank, bucket: Bucket, ready: float) -> tuple[float, float]:
    """When a bucket's new parameters have left the optimizer's memory, and when they are stored (or on disk)."""
    first, last = stores(bucket)
    moved = ready
    if first is not None:
        moved = rank.send(first.axis, first.bytes, ready)
    done = rank.along(view.routes[bucket.name].restore, moved)
    done = done if last is None else rank.send(last.axis, last.bytes, done)
    return moved, rank.send("written", files(bucket).get("written", 0), done)


def _updated(needs: OptimizerNeeds, memory: str) -> int:
    """Bytes of a memory that an update reads and writes."""
    return needs.states[memory]


def _moved(needs: OptimizerNeeds, memory: str) -> int:
    """Bytes of a memory that an update brings there and back."""
    return needs.bytes[memory] // MEMORIES[memory].slots if MEMORIES[memory].rests else 0


def _shares(view: PlanValue, buckets: Sequence[Bucket], of: Callable[[OptimizerNeeds, str], int]) -> dict[str, float]:
    """Bucket name -> its share of some bytes of its memory, in proportion to its elements."""
    elements = Counter[str]()
    for bucket in buckets:
        elements[bucket.memory.optimizer] += bucket.owned
    (needs,) = view.needs or (None,)
    return {
        bucket.name: of(needs, bucket.memory.optimizer) * bucket.owned / elements[bucket.memory.optimizer]
        if needs
        else 0
        for bucket in buckets
    }

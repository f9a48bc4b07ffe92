"""The operations of the end of a step: sums between stages, the update on the device and elsewhere, new parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

from shardlib.common.disk import whole_blocks
from shardlib.common.dtypes import dtype_name
from shardlib.mesh.memories import AHEAD, MEMORIES, WRITING
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import share, tied_bytes
from shardlib.plan.program.clock import NOW
from shardlib.plan.program.ops import Op, Overhead, Resume, Scalars, Send, Timestamp, Update, Wait
from shardlib.plan.program.passes import BLOCKS, along, landed
from shardlib.plan.records import OptimizerNeeds
from shardlib.plan.value import PlanValue

_SLOTS = 2  # groups of new parameters that are on their way at once
_BEFORE, _IN, _AFTER = "before the update", "in the update", "after the update"


def ending(plan: PlanValue) -> Iterator[Op]:
    """What follows the last micro-batch on one rank, before ranks begin the update together: gradients of tied leaves go to
    the leaves' other homes, and averaged buffers to all."""
    last = "after the last micro-batch"
    yield Resume("update")
    for axis in plan.stages.axes:
        for bucket in plan.trained:
            for _ in bucket.homes[1:]:
                form, name = dtype_name(bucket.reduce_dtype), f"{bucket.name} goes to its homes"
                yield Send("tied gradients", axis, last, form, tied_bytes(bucket), bucket.unit, name)
                yield Wait((name,))
    for dtype, numel, averaged in plan.buffers:
        for axis in plan.batch_axes if averaged else ():
            sent = 2 * share(numel * dtype.itemsize, plan.sizes[axis])
            yield Send("buffers", axis, last, dtype_name(dtype), sent, name="buffers", sums=True)
            yield Wait(("buffers",))


def updating(plan: PlanValue, owned: bool) -> Iterator[Op]:
    """The update of one rank, and the gathers after it. It begins when every rank has its gradients."""
    (needs,) = plan.needs or (None,)
    here = [bucket for bucket in plan.trained if bucket.memory.optimizer == "device"]
    yield Timestamp("start")
    yield Overhead("step")
    yield Overhead("bucket", len(plan.trained))
    for axis in plan.loss_axes:
        yield Scalars(axis)
    means = [plan.routes[bucket.name].mean for bucket in plan.trained] if owned else []
    for mean in filter(None, means):
        yield from along((mean,), "gradients", _IN, "mean")
        yield Wait(("mean",))
    for axis, sent in needs.payload.items() if needs else ():
        yield Send("optimizer", axis, _IN, "as it asks", sent, name="optimizer")
        yield Wait(("optimizer",))
    yield Update()
    reads = [read for bucket in here for read in _files(bucket, "read", ("start",))]
    yield from reads
    yield Wait(tuple(read.name for read in reads))
    ends: list[str] = []
    for bucket in here:
        ends += yield from _store(plan, bucket, (NOW,))
    ends += yield from _elsewhere(plan, needs)
    yield Wait(tuple(ends))


def _elsewhere(plan: PlanValue, needs: OptimizerNeeds | None) -> Generator[Op, None, list[str]]:
    """The host's updates, bucket by bucket, in the order in which gradients land; returns the names of what ends them.

    States on disk are read ahead and written behind, in memory for a few buckets, and the step ends when all are written.
    New parameters go up from slots that take turns. Updates that run ahead begin before the start: as gradients land, or at
    once where they are those of the step before. They have memory of their own, and what they make goes up from the start on,
    once all are made.
    """
    buckets = [bucket for bucket in reversed(plan.trained) if bucket.memory.optimizer != "device"]
    states, moves = (_shares(needs, buckets, of) for of in (_states, _moved))
    ahead, delayed = plan.step.ahead, plan.step.update == "delay"
    start: tuple[str, ...] = () if ahead else ("start",)
    ends: list[str] = []
    updates: list[str] = []
    for number, bucket in enumerate(buckets):
        arrived = tuple(landed(tile) for tile in bucket.cut)
        updated, written = f"{bucket.name} is updated", f"{bucket.name}'s states are written"
        after = (*(updates[-1:] or start), *(() if delayed else arrived))
        if number >= _SLOTS and not ahead:
            after += (_sent(buckets[number - _SLOTS]),)
        if MEMORIES[bucket.memory.optimizer].rests:
            asked = (updates[number - AHEAD],) if number >= AHEAD else start
            if number >= AHEAD + 1 + WRITING:
                asked += (f"{buckets[number - AHEAD - 1 - WRITING].name}'s states are written",)
            reads = [Send("states", "read", _BEFORE, BLOCKS, moves[bucket.name], bucket.unit, "states", asked)]
            if MEMORIES[bucket.memory.grad].rests:
                for tile in bucket.cut:
                    size = whole_blocks(tile.owned * tile.reduce_dtype.itemsize)
                    name = f"{tile.name}'s gradient is read"
                    reads.append(
                        Send("gradients", "read", _BEFORE, BLOCKS, size, tile.unit, name, (*asked, landed(tile)))
                    )
            reads += _files(bucket, "read", asked)
            yield from reads
            after += tuple(read.name for read in reads)
        yield Update(bucket.memory.optimizer, bucket.name, states[bucket.name], updated, after)
        updates.append(updated)
        if not ahead:
            ends += yield from _store(plan, bucket, (updated,))
        if moves[bucket.name]:
            yield Send("states", "written", _AFTER, BLOCKS, moves[bucket.name], bucket.unit, written, (updated,))
        ends += [*arrived, updated, written]
    for bucket in buckets if ahead else ():
        ends += yield from _store(plan, bucket, ("start", updates[-1]))
    return ends


def _store(plan: PlanValue, bucket: Bucket, after: tuple[str, ...]) -> Generator[Op, None, list[str]]:
    """New parameters leave the optimizer's memory, are gathered on the device and go to where they are stored. Returns the
    names of all this."""
    form, size, unit = dtype_name(bucket.dtype), bucket.dtype.itemsize, bucket.unit
    stored = MEMORIES[bucket.memory.param].works
    there = "device" if bucket.owners(bucket.param_level) > 1 else stored  # what is gathered is on the device
    names: list[str] = []

    def then(name: str) -> tuple[str, tuple[str, ...]]:
        before = (names[-1],) if names else after
        names.append(name)
        return name, before

    if MEMORIES[bucket.memory.optimizer].works != there:
        way = "up" if there == "device" else "down"
        yield Send("parameters", way, _AFTER, form, bucket.owned * size, unit, *then(_sent(bucket)))
    if route := plan.routes[bucket.name].restore:
        yield from along(route, "parameters", _AFTER, *then(f"{bucket.name} is whole"))
    if there != stored:
        whole = bucket.size(bucket.param_level) * size
        yield Send("parameters", "down", _AFTER, form, whole, unit, *then(f"{bucket.name} is down"))
    for write in _files(bucket, "written", (names[-1],) if names else after):
        yield write
        names.append(write.name)
    return names


def _sent(bucket: Bucket) -> str:
    return f"{bucket.name} has left the optimizer's memory"


def _files(bucket: Bucket, way: str, after: tuple[str, ...]) -> list[Send]:
    """What an update reads or writes of parameters that rest in files: new values, and old ones that no master stands for."""
    if not MEMORIES[bucket.memory.param].rests or (way == "read" and bucket.master_dtype is not None):
        return []
    sizes = [whole_blocks(tile.size(tile.param_level) * tile.dtype.itemsize) for tile in bucket.cut]
    when = _BEFORE if way == "read" else _AFTER
    return [Send("parameters", way, when, BLOCKS, sum(sizes), bucket.unit, f"{bucket.name} is {way}", after)]


def _states(needs: OptimizerNeeds, memory: str) -> int:
    """Bytes of a memory that an update reads and writes."""
    return needs.states[memory]


def _moved(needs: OptimizerNeeds, memory: str) -> int:
    """Bytes of a memory that an update brings there and back."""
    return needs.bytes[memory] // MEMORIES[memory].slots if MEMORIES[memory].rests else 0


def _shares(
    needs: OptimizerNeeds | None, buckets: Sequence[Bucket], of: Callable[[OptimizerNeeds, str], int]
) -> dict[str, int]:
    """Bucket name -> its share of some bytes of its memory, in proportion to its elements. All shares are the whole."""
    elements = Counter[str]()
    for bucket in buckets:
        elements[bucket.memory.optimizer] += bucket.owned
    before, found = Counter[str](), dict[str, int]()
    for bucket in buckets:
        memory = bucket.memory.optimizer
        start, before[memory] = before[memory], before[memory] + bucket.owned
        whole = of(needs, memory) if needs else 0
        found[bucket.name] = whole * before[memory] // elements[memory] - whole * start // elements[memory]
    return found

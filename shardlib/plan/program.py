"""The program of one rank: what it does in a step, in order. Payload, transfers, predicted time and print-out visit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlib.common.disk import whole_blocks
from shardlib.common.tensors import dtype_name
from shardlib.mesh.memories import AHEAD, DIRECTIONS, MEMORIES, WRITING
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import share, tied_bytes
from shardlib.plan.ops import NOW, Compute, Op, Overhead, Resume, Scalars, Send, Timestamp, Update, Wait
from shardlib.plan.passes import BLOCKS, Pass, along, handed, landed, ops_of, part
from shardlib.plan.records import OptimizerNeeds
from shardlib.plan.tables import size
from shardlib.plan.value import PlanValue
from shardlib.schedules import Action, Kind

# The operations of the end of a step: sums between stages, the update on the device and elsewhere, new parameters.


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
    states, moves = (_shares(needs, buckets, moved) for moved in (False, True))
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


def _shares(needs: OptimizerNeeds | None, buckets: Sequence[Bucket], moved: bool) -> dict[str, int]:
    """Bucket name -> its share of what the update reads and writes of states in its memory, or of what it brings there and
    back, in proportion to its elements. All shares are the whole."""
    elements = Counter[str]()
    for bucket in buckets:
        elements[bucket.memory.optimizer] += bucket.owned
    before, found = Counter[str](), dict[str, int]()
    for bucket in buckets:
        memory = bucket.memory.optimizer
        kind = MEMORIES[memory]
        start, before[memory] = before[memory], before[memory] + bucket.owned
        whole = 0
        if needs is not None:
            whole = needs.states[memory] if not moved else needs.bytes[memory] // kind.slots if kind.rests else 0
        found[bucket.name] = part(whole, start, before[memory], elements[memory])
    return found


@dataclass(frozen=True)
class Program:
    """The operations of one rank in a step; ``print`` it.

    A rank makes passes (a micro-batch's forward or backward in a stage) in the order of its plan's schedule, then what ends
    the micro-batches, and then, with all other ranks, the update. Autograd drives a pass: the executor makes the exchanges
    of a pass over each axis in the program's order, as tests hold.

    Attributes:
        plan: the part of the plan for the rank.
        owned: whether the optimizer sums over its axis itself (1-bit Adam, once its variance is frozen).
    """

    plan: PlanValue
    owned: bool = False

    @classmethod
    def of(cls, plan: PlanValue, owned: bool = False) -> Program:
        """The program of a part of a plan, made once: all that visit it share it."""
        if owned not in plan.programs:
            plan.programs[owned] = cls(plan, owned)
        return plan.programs[owned]

    @cached_property
    def actions(self) -> Mapping[Action, Pass]:
        """The passes of a step, in order."""
        (home,) = {self.plan.stages.schedule.rank_of[stage] for stage in self.plan.local_stages}
        order = self.plan.stages.schedule.orders[home]
        last = {a.stage: a.microbatch for a in order if a.kind in (Kind.B, Kind.W)}
        on_disk = any(bucket.memory.grad == "disk" for bucket in self.plan.trained)
        begun, found = set[int](), dict[Action, Pass]()
        for action in order:
            stage, kind, microbatch = action
            reduces = kind in (Kind.B, Kind.W)
            final = reduces and last[stage] == microbatch
            found[action] = Pass(stage, kind, final, reduces and on_disk and stage in begun)
            if reduces:
                begun.add(stage)
        return found

    def ops(self, one: Pass) -> tuple[Op, ...]:
        """The operations of a pass, in order."""
        if one not in self._ops:
            self._ops[one] = ops_of(self.plan.of_stage(one.stage).tiled, one, self.owned)
        return self._ops[one]

    def handed(self, one: Pass) -> tuple[Send, ...]:
        """What a pass ends with: messages to another stage."""
        return handed(self.plan.everywhere, one)

    @cached_property
    def _ops(self) -> dict[Pass, tuple[Op, ...]]:
        return {}

    @cached_property
    def ending(self) -> tuple[Op, ...]:
        """What follows the last pass, before the ranks begin the update together."""
        return tuple(ending(self.plan))

    @cached_property
    def updating(self) -> tuple[Op, ...]:
        return tuple(updating(self.plan, self.owned))

    def parts(self) -> Iterator[tuple[str, tuple[Op, ...], int]]:
        """The parts of a step: a name, operations in order, and how often the step has them. Equal passes are one part."""
        stages = len(self.plan.local_stages) > 1 or self.plan.stages.axis is not None
        for one, times in Counter(self.actions.values()).items():
            yield f"{one}, stage {one.stage}" if stages else str(one), (*self.ops(one), *self.handed(one)), times
        yield "after the last micro-batch", self.ending, 1
        yield "update", self.updating, 1

    def sends(self) -> Iterator[tuple[Send, int]]:
        """Everything that the rank sends or moves, and how often in a step."""
        for _, ops, times in self.parts():
            yield from ((op, times) for op in ops if isinstance(op, Send) and op.bytes)

    def __str__(self) -> str:
        lines: list[str] = []
        for name, ops, times in self.parts():
            shown = [line for op in ops if (line := _line(op))]
            if shown:
                lines.append(f"{name}, {times} times:" if times > 1 else f"{name}:")
                lines += [f"  {line}" for line in shown]
        return "\n".join(lines)


def _line(op: Op) -> str:
    """An operation as text; "" for what neither computes nor sends."""
    if isinstance(op, Compute):
        return f"compute {op.unit or '(top)'}"
    if isinstance(op, Send) and op.bytes:
        of = f" of {op.unit}" if op.unit else ""
        return f"{'move' if op.moves else 'send'} {op.what}{of}: {op.link}, {size(op.bytes)}, {op.form}"
    return ""


@dataclass(frozen=True)
class Message:
    """A message that one rank sends over an axis, or a transfer between memories, ``times`` times in a step.

    Attributes:
        what, when, form: as of `shardlib.plan.ops.Send`.
        axis: of the mesh; of a transfer "down" from the device or "up" to it, or "read" or "written" of what rests in files.
        payload: bytes of one message.
        collectives: that one message is: a fraction, or several, where what a loss exchanges is divided evenly among units.
    """

    what: str
    axis: str
    when: str
    form: str
    payload: int
    times: int = 1
    collectives: float = 1.0

    @property
    def bytes(self) -> int:
        return self.payload * self.times


def messages(plan: PlanValue, *, owned: bool = False, moves: bool = False) -> Iterator[Message]:
    """Every message that one rank sends in a step; ``plan`` is that rank's part of a plan (`Plan.at`).

    Args:
        owned: as for `payload`.
        moves: gives what the rank moves between memories instead.
    """
    for send, times in Program.of(plan, owned).sends():
        if send.moves is moves:
            yield Message(send.what, send.link, send.when, send.form, send.bytes, times, send.collectives)


def payload(plan: PlanValue, *, owned: bool = False) -> dict[str, int]:
    """Axis -> payload bytes one rank sends per step, without scalars.

    Activations and what passes between stages are counted if the plan was traced, the optimizer's messages (whole leaves,
    sums of rows) if the plan was made with an optimizer. With several stages, the maximum over ranks for each axis.

    Args:
        owned: counts a step whose optimizer sums over its axis itself (1-bit Adam, once its variance is frozen).
    """
    axes = [axis for axis, size in plan.sizes.items() if size > 1]
    return _most([messages(view, owned=owned) for view in plan.views], axes)


def transfers(plan: PlanValue) -> dict[str, int]:
    """Direction -> bytes that one rank moves in a step, without numbers such as the loss; "read" and "written" if the plan
    knows of states in files. With several stages, the maximum over ranks."""
    found = [list(messages(view, moves=True)) for view in plan.views]
    ways = dict.fromkeys([*DIRECTIONS, *(transfer.axis for each in found for transfer in each)])
    return _most(found, ways)


def _most(views: Iterable[Iterable[Message]], axes: Iterable[str]) -> dict[str, int]:
    """Axis -> bytes of the view that has most."""
    most = dict.fromkeys(axes, 0)
    for view in views:
        total = dict.fromkeys(most, 0)
        for message in view:
            if message.axis in total:
                total[message.axis] += message.bytes
        most = {axis: max(most[axis], count) for axis, count in total.items()}
    return most

"""The operations of a micro-batch's forward and backward in one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardlib.common.disk import whole_blocks
from shardlib.common.tensors import dtype_name
from shardlib.mesh.memories import AHEAD, MEMORIES
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Collective, Exchange, unowned
from shardlib.plan.ops import NOW, Compute, Hold, Limit, Op, Overhead, ReadAhead, Send, Timestamp, Wait
from shardlib.plan.value import PlanValue
from shardlib.schedules import Kind

BLOCKS = "whole blocks"
_ASKED = ("asked",)
_EACH, _LAST = "each micro-batch", "after the last micro-batch"


@dataclass(frozen=True)
class Pass:
    """A micro-batch's forward or backward in a stage; equal ones do the same.

    Attributes:
        final: whether its gradients are the last of the step.
        further: whether it reads sums of earlier gradients from disk.
    """

    stage: int
    kind: Kind
    final: bool = False
    further: bool = False

    def __str__(self) -> str:
        names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradients", Kind.W: "weight gradients"}
        return names[self.kind] + " of the last micro-batch" * self.final


def along(
    route: Sequence[Exchange], what: str, when: str, name: str, after: tuple[str, ...] = (NOW,)
) -> Iterator[Send]:
    """A bucket's exchanges, one after the other. The last one has the ``name``."""
    for number, exchange in enumerate(route, 1):
        summed = exchange.op is Collective.SUM
        plain = summed and exchange.channel is None  # codecs send a sum as two other exchanges
        yield Send(
            what,
            exchange.axis,
            when,
            exchange.form,
            exchange.payload,
            exchange.bucket.unit,
            name if number == len(route) else f"{name}, {number}",
            after,
            rounds=2.0 if summed and not plain else 1.0,
            sums=plain,
        )
        after = (f"{name}, {number}",)


def part(whole: int, start: int, stop: int, of: int) -> int:
    """The bytes of ``whole`` from one of ``of`` equal parts to another. All parts together are the whole."""
    return whole * stop // of - whole * start // of


def ops_of(plan: PlanValue, one: Pass, owned: bool) -> tuple[Op, ...]:
    """The operations of a pass, in order.

    Args:
        plan: of the stage, as a step runs it (`PlanValue.tiled`).
        owned: whether the optimizer sums over its axis itself.
    """
    return tuple(_Ops(plan, one, owned).all())


class _Ops:
    def __init__(self, plan: PlanValue, one: Pass, owned: bool) -> None:
        self._plan, self._pass = plan, one
        owner = plan.reductions.owner if owned else None
        self._unreduced = (owner.axis,) if owner else ()
        self._trace = plan.traces[one.stage] if plan.traces else None
        self._forward = one.kind is Kind.F
        self._gathers = one.kind is not Kind.W
        forward, backward = plan.touches
        units = [unit for unit in plan.units if unit not in plan.left_out]
        # In the order of first use: as gradients are complete, in reverse, and as units are gathered.
        reduced = self._trace.reduced if self._trace else ()
        units = [unit for unit, _ in _visits(units, [unit for unit in reversed(reduced) if unit not in plan.left_out])]
        self._order = [*dict.fromkeys(unit for unit, _ in _visits(units, forward))]
        if self._forward:
            self._visits = list(_visits(units, forward))
        else:
            self._visits = list(_visits(self._order[::-1], backward if self._gathers else ()))
        before = set[str]() if self._forward else set(forward)
        self._coming: list[tuple[str, bool]] = []  # the units that are gathered, and whether they were before
        for unit, gathers in self._visits:
            if gathers:
                self._coming.append((unit, unit in before))
                before.add(unit)
        self._here = len(self._coming)
        if self._forward:  # reads ahead for backward too
            self._coming += [(unit, True) for unit in backward]
        self._times = Counter(unit for unit, _ in self._visits)
        self._last = {unit: number for number, (unit, _) in enumerate(self._visits)}  # a unit's last visit
        self._pending = units  # whose gradients are not complete, the next one last
        self._stores = self._trace is not None and self._gathers and bool(self._trace.down or self._trace.up)

    def all(self) -> Iterator[Op]:
        plan, visits, coming = self._plan, self._visits, self._coming
        yield Overhead("walk")
        yield from self._up(0)
        gathered = used = 0  # of the units that are gathered here: whose gather has begun, and whose use has
        for number, (unit, gathers) in enumerate(visits):
            yield Timestamp(*_ASKED)
            if gathers and gathered == used:
                yield from self._gather(*coming[gathered])
                gathered += 1
            if gathers:
                yield Wait(tuple(_arrived(bucket) for bucket in plan.buckets_of[unit]))
                used += 1
            if self._gathers and plan.step.prefetch:
                if gathered == used < self._here:
                    yield from self._gather(*coming[gathered])
                    gathered += 1
                present = {other for other, _ in coming[max(used - 1, 0) : gathered]}
                for other, again in coming[used : used + AHEAD]:
                    if other not in present and (reads := tuple(self._reads(other, again))):
                        yield ReadAhead(reads)
            if self._forward:
                yield from self._down(number)
            elif self._stores:
                yield Wait((_inputs(unit),))
                yield from self._up(number + 1)
            yield self._compute(unit)
            yield from self._activations(number)
            if self._forward and self._stores and number + 1 < len(visits):
                yield Wait((_inputs(unit),))
            yield from self._reduced(number)

    def _compute(self, unit: str) -> Compute:
        kind, trace, count = self._pass.kind, self._trace, len(self._visits)
        half = 0.5 if kind in (Kind.I, Kind.W) else 1.0
        launches = trace.launches[not self._forward] * half / count if trace else 0.0
        recomputed = self._recomputed() / count if kind in (Kind.B, Kind.I) else 0.0
        share = half / self._times[unit]
        return Compute(self._pass.stage, unit, not self._forward, share, launches, recomputed)

    def _recomputed(self) -> int:
        """Blocks that a micro-batch's backward computes again; none without a trace."""
        if self._trace is None or self._plan.step.remat is None:
            return 0
        blocks, most = self._trace.blocks, self._plan.step.remat.blocks
        return blocks if most is None else min(blocks, most)

    def _gather(self, unit: str, again: bool) -> Iterator[Op]:
        """A unit comes up and is gathered. What comes up is asked for at the mark, without waiting for the unit before."""
        plan = self._plan
        asked: tuple[str, ...] = _ASKED
        reads = tuple(self._reads(unit, again))
        yield from reads
        if any(bucket.fetched for bucket in plan.buckets_of[unit]):
            yield Overhead("unit")
        if reads:
            asked = (*_ASKED, *(read.name for read in reads))
            yield Wait(asked)  # the rank waits for its disks
        for bucket in plan.buckets_of[unit]:
            routes, arrived = plan.routes[bucket.name], _arrived(bucket)
            before: tuple[str, ...] = (NOW,)
            route = routes.again if again else routes.gather
            if sent := fetched(plan, bucket, again=again):
                up = f"{bucket.name} comes up" if route else arrived
                yield Send("parameters", "up", "before each use", dtype_name(bucket.dtype), sent, unit, up, asked)
                before = (up, NOW)
            yield from along(route, "parameters", _EACH, arrived, before)

    def _reads(self, unit: str, again: bool) -> Iterator[Send]:
        for bucket in self._plan.buckets_of[unit]:
            if MEMORIES[bucket.memory.param].rests and (sent := fetched(self._plan, bucket, again=again)):
                name = f"{bucket.name} is read"
                yield Send("parameters", "read", "before each use", BLOCKS, whole_blocks(sent), unit, name, _ASKED)

    def _activations(self, number: int) -> Iterator[Op]:
        """The collectives of the loss, which units have equal parts of."""
        trace, count = self._trace, len(self._visits)
        if trace is None or not self._gathers:
            return
        for axis, sent in trace.activations.items():
            half = sent // 2 if self._forward else sent - sent // 2
            calls, name = trace.collectives.get(axis, 0) / 2 / count, f"activations over {axis}"
            here, unit = part(half, number, number + 1, count), self._visits[number][0]
            form = "as computed"
            yield Send("activations", axis, _EACH, form, here, unit, name, (NOW,), calls, rounds=calls, sums=True)
            yield Wait((name,))

    def _down(self, number: int) -> Iterator[Send]:
        """Inputs of blocks, of which units have equal parts, go down in forward."""
        if self._stores and self._trace:
            sent, unit = part(self._trace.down, number, number + 1, len(self._visits)), self._visits[number][0]
            yield Send("inputs of blocks", "down", _EACH, "as computed", sent, unit, _inputs(unit))

    def _up(self, number: int) -> Iterator[Send]:
        """Inputs of blocks come up in backward, for one visit ahead; for the first one when they are down."""
        if self._stores and self._trace and not self._forward and number < len(self._visits):
            sent, unit = part(self._trace.up, number, number + 1, len(self._visits)), self._visits[number][0]
            after = (NOW,) if number else (NOW, _inputs(unit))
            yield Send("inputs of blocks", "up", _EACH, "as computed", sent, unit, _inputs(unit), after)

    def _reduced(self, number: int) -> Iterator[Op]:
        """The reductions that begin when a visit is over: gradients are complete in the reverse of the order of first use,
        once a unit's last use in backward is over."""
        if self._pass.kind not in (Kind.B, Kind.W):
            return
        while self._pending and self._last[self._pending[-1]] <= number:
            yield from self._reduce(self._pending.pop())

    def _reduce(self, unit: str) -> Iterator[Op]:
        plan, final = self._plan, self._pass.final
        late = self._trace.again if self._trace else ()
        for bucket in plan.trained_in.get(unit, ()):
            routes, name = plan.routes[bucket.name], f"{bucket.name} is reduced"
            last = unowned(routes.last, self._unreduced) if final else ()
            lands = bucket.memory.optimizer != "device" and (final or plan.lands_each(bucket))
            if not (routes.each or last or lands):
                continue
            yield Timestamp(name)
            for _ in range(1 + (bucket.name in late)):
                yield from along(routes.each, "gradients", _EACH, name, (name, NOW))
                yield from along(last, "gradients", _LAST, name, (name, NOW))
            yield Hold(("pass", "update"), name)
            if lands:
                yield from self._land(bucket, name)

    def _land(self, bucket: Bucket, reduced: str) -> Iterator[Op]:
        """A gradient goes down, and to disk if it rests there; the rank waits while more than two units are on their way."""
        plan, size, form = self._plan, bucket.owned * bucket.reduce_dtype.itemsize, dtype_name(bucket.reduce_dtype)
        each = plan.lands_each(bucket)
        when, down, name = _EACH if each else "when summed", f"{bucket.name} goes down", landed(bucket)
        rests = MEMORIES[bucket.memory.grad].rests
        yield Send("gradients", "down", when, form, size, bucket.unit, down if rests else name, (reduced,))
        if rests:
            before, blocks = (down,), whole_blocks(size)
            if self._pass.further:  # the sum so far
                further = f"{bucket.name} is read again"
                when_read = "each further micro-batch"
                yield Send("gradients", "read", when_read, BLOCKS, blocks, bucket.unit, further, before)
                before = (further,)
            yield Send("gradients", "written", when, BLOCKS, blocks, bucket.unit, name, before)
            yield Hold(("update",), name)  # all are written before the first update
            yield Limit("written", name, bucket.owned, (AHEAD + 1) * plan.largest_unit)
        there = down if rests else name
        if plan.step.microbatches > 1 and each:
            yield Hold(("update",), there)  # the host sums them, and the squares of the sum
        yield Limit("down", there, bucket.owned, plan.most_in_flight)


def handed(plan: PlanValue, one: Pass) -> tuple[Send, ...]:
    """What a stage on another rank waits for. (No pass waits for it.)

    Args:
        plan: of all stages.
    """
    forward, schedule = one.kind is Kind.F, plan.stages.schedule
    other = one.stage + 1 if forward else one.stage - 1
    if plan.traces is None or one.kind is Kind.W or not 0 <= other < schedule.stages:
        return ()
    if schedule.rank_of[other] == schedule.rank_of[one.stage]:
        return ()
    sent = plan.traces[one.stage].forward if forward else plan.traces[other].backward
    (axis,) = plan.stages.axes
    name, hops = f"to stage {other}", 1 / (schedule.ranks - 1)
    return (Send("carries", axis, _EACH, "as computed", sent, name=name, rounds=hops),)


def fetched(plan: PlanValue, bucket: Bucket, *, again: bool) -> int:
    """Bytes of a bucket's parameters that come up for a use; ``again``: after the micro-batch's first."""
    routes = plan.routes[bucket.name]
    kept = again and len(routes.again) < len(routes.gather)  # the second shard is on the device
    if bucket.memory.param == "device" or kept:
        return 0
    return bucket.size(bucket.param_level) * bucket.dtype.itemsize


def landed(bucket: Bucket) -> str:
    """The name of what brings a gradient to the memory of its optimizer."""
    return f"{bucket.name} has landed"


def _arrived(bucket: Bucket) -> str:
    return f"{bucket.name} is gathered"


def _inputs(unit: str) -> str:
    return f"inputs of {unit}"


def _visits(order: Sequence[str], touches: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The units in the order of use, and whether they are gathered: what needs no gather stands where ``order`` has it."""
    touches = list(touches)
    touched, between, last = set(touches), dict[str | None, list[str]](), None
    for unit in order:
        if unit in touched:
            last = unit
        else:
            between.setdefault(last, []).append(unit)
    yield from ((unit, False) for unit in between.pop(None, ()))
    for unit in touches:
        yield unit, True
        yield from ((other, False) for other in between.pop(unit, ()))

"""The clocks of one rank in a predicted step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import AHEAD, MEMORIES
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange, Op
from shardlib.plan.machine import Link, Overheads
from shardlib.plan.transfers import fetched
from shardlib.plan.value import PlanValue


@dataclass(frozen=True)
class Rates:
    """What things take on a rank.

    Attributes:
        bandwidth: link -> bytes per second; "launches" -> operators per second.
        links: axis -> its link, with the latency of all hops of a collective; without one, nothing but bandwidth counts.
        lines: axis -> what it shares with other axes of the same name, where one message waits for another.
        overheads: of Python.
    """

    bandwidth: Mapping[str, float]
    links: Mapping[str, Link] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    overheads: Overheads = field(default_factory=Overheads)

    def link(self, name: str, sums: bool = False) -> Link:
        """An axis' link, to all-reduces or to other exchanges."""
        link = self.links.get(name) or Link(self.bandwidth.get(name, math.inf))
        return link.summing if sums else link


class Walked(NamedTuple):
    """What a walk did to a rank, by the time at which it began.

    Attributes:
        seconds: that it took, of which it ``computed`` some.
        free: line -> when its last message is through.
        busy: link -> seconds that it was busy.
        reduced: when the last reduction of gradients is done.
        flown: when the last reduction is over its links.
    """

    seconds: float
    computed: float
    free: Mapping[str, float]
    busy: Mapping[str, float]
    reduced: float
    flown: float


class OnTheWay:
    """What is on its way over a link, the oldest first."""

    def __init__(self) -> None:
        self._each: deque[tuple[float, int]] = deque()
        self._elements = 0

    def until(self, done: float, elements: int, most: int) -> float:
        """Send some more, which will be there at ``done``; returns when no more than ``most`` elements are on their way, or 0
        if that is so now."""
        self._each.append((done, elements))
        self._elements += elements
        when = 0.0
        while self._elements > most:
            there, gone = self._each.popleft()
            self._elements -= gone
            when = max(when, there)
        return when


@dataclass
class Rank:
    """The clocks of one rank.

    Attributes:
        owned: the axis that the optimizer sums over itself, or None.
        now: the time on the processor.
        computed: seconds that the processor has computed.
        reduced: when the last reduction of gradients is done.
        flown: when the last reduction is over its links, until when the rank does not compute again.
        busy: link -> seconds that it was busy.
        landed: bucket, or a tile of one -> when its last gradient is in the memory of its optimizer.
    """

    rates: Rates
    owned: str | None = None
    now: float = 0.0
    computed: float = 0.0
    reduced: float = 0.0
    flown: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    landed: dict[str, float] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # line -> when its last message is through
    _arrival: dict[str, float] = field(default_factory=dict)  # unit -> when its gather is done

    _read: dict[str, float] = field(default_factory=dict)  # unit -> when its parameters are read
    _kept: dict[str, float] = field(default_factory=dict)  # unit -> when its blocks' inputs are where they were sent
    _landing: OnTheWay = field(default_factory=OnTheWay)  # gradients, until they are down
    _writing: OnTheWay = field(default_factory=OnTheWay)  # until they are on disk

    def walk(
        self,
        plan: PlanValue,
        seconds: Mapping[str, float],
        last: bool | None = None,
        whole: bool = True,
        first: bool = False,
        launches: float = 0.0,
        recomputed: float = 0.0,
    ) -> None:
        """Compute each unit's ``seconds`` in turn, with the unit's gathers, activations and reductions.

        Args:
            launches: operators that the walk begins, of which units have equal shares.
            recomputed: blocks that the walk computes again, of which units have equal shares too.
            last: None in a walk without gradients; else whether its gradients are the step's last.
            whole: whether parameters are gathered and activations exchanged; not so for weight gradients alone.
            first: whether this is the micro-batch's first walk.
        """
        units = list(seconds)
        self.compute(self.rates.overheads.walk)
        (stage,) = plan.local_stages
        trace = plan.traces[stage] if whole and plan.traces else None
        sent = trace.activations if trace else {}
        # Inputs of blocks, which take equal shares: down before the next unit in forward, up one unit ahead in backward.
        down, up = (trace.down / len(units), trace.up / len(units)) if trace and units else (0.0, 0.0)
        if not first and units:
            self._kept[units[0]] = self.send("up", up, max(self.now, self._kept.get(units[0], 0.0)))
        following = [(unit, not first) for unit in units]
        following += [(unit, True) for unit in reversed(units) if first]  # forward reads ahead for backward too
        for number, (unit, after) in enumerate(zip(units, [*units[1:], None]), 1):
            asked = self.now
            if whole:
                self._gather(plan, unit, first, asked)
                self.now = max(self.now, self._arrival[unit])
                if after is not None and plan.step.prefetch:
                    self._gather(plan, after, first, asked)
                for coming, again in following[number : number + AHEAD] if plan.step.prefetch else ():
                    if coming not in (unit, after):  # which are here
                        self._fetch(plan, coming, again, self.now)
            if first:
                self._kept[unit] = self.send("down", down, self.now)
            else:
                self.now = max(self.now, self._kept[unit])
                if after is not None:
                    self._kept[after] = self.send("up", up, self.now)
            self.compute(seconds[unit])
            self.launch(launches / len(units))
            self.compute(recomputed / len(units) * self.rates.overheads.recompute)
            for axis, count in sent.items():
                collectives = trace.collectives.get(axis, 0) / 2 / len(units) if trace else 0.0
                arrived = self.exchange(axis, count / 2 / len(units), self.now, collectives, collectives, sums=True)
                self.now = max(self.now, arrived)
            if first and after is not None:
                self.now = max(self.now, self._kept[unit])
            if last is not None:
                self._reduce(plan, unit, last)
        self._arrival.clear()

    def noted(self, walk: Callable[[], None]) -> Walked:
        """What a walk does."""
        now, computed, reduced, flown, busy = self.now, self.computed, self.reduced, self.flown, self.busy
        self.reduced, self.flown, self.busy = -math.inf, -math.inf, {}
        walk()
        lines = {self.rates.lines.get(link, link) for link in self.busy}
        free = {line: self._free[line] - now for line in lines if line in self._free}
        seconds, computed = self.now - now, self.computed - computed
        found = Walked(seconds, computed, free, self.busy, self.reduced - now, self.flown - now)
        self.reduced, self.flown, self.busy = max(reduced, self.reduced), max(flown, self.flown), busy
        self._add_busy(found.busy)
        return found

    def walk_again(self, walked: Walked) -> None:
        """What a walk did, from now on."""
        self.reduced = max(self.reduced, self.now + walked.reduced)
        self.flown = max(self.flown, self.now + walked.flown)
        for line, free in walked.free.items():
            self._free[line] = self.now + free
        self._add_busy(walked.busy)
        self.now += walked.seconds
        self.computed += walked.computed

    def _add_busy(self, busy: Mapping[str, float]) -> None:
        for link, seconds in busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def launch(self, count: float) -> None:
        """Begin operators, each of which takes a fixed time beside that of its elements."""
        if rate := self.rates.bandwidth.get("launches"):
            self.compute(count / rate)
            self.busy["launches"] = self.busy.get("launches", 0.0) + count / rate

    def send(self, link: str, count: float, ready: float, passes: float = 1.0, sums: bool = False) -> float:
        """The time at which ``count`` bytes, ready at time ``ready``, have gone over a link.

        Args:
            passes: how often the hops of a collective are waited for.
            sums: whether they go as all-reduces.
        """
        if link not in self.rates.bandwidth or not count:
            return ready
        rate = self.rates.link(link, sums)
        seconds, line = count / rate.bandwidth + passes * rate.latency, self.rates.lines.get(link, link)
        self._free[line] = max(ready, self._free.get(line, 0.0)) + seconds
        self.busy[link] = self.busy.get(link, 0.0) + seconds
        return self._free[line]

    def along(self, route: Sequence[Exchange], ready: float) -> float:
        """The time at which a bucket's exchanges are done that start at ``ready``; the optimizer's own sums take no time."""
        for exchange in route:
            if exchange.op is not Op.SUM or exchange.axis != self.owned:
                summed = exchange.op is Op.SUM
                plain = summed and exchange.channel is None  # codecs send a sum as two other exchanges
                passes = 2.0 if summed and not plain else 1.0
                ready = self.exchange(exchange.axis, exchange.payload, ready, passes, sums=plain)
        return ready

    def exchange(
        self, axis: str, count: float, ready: float, passes: float = 1.0, times: float = 1.0, sums: bool = False
    ) -> float:
        """The time at which ``times`` collectives are done, which the rank begins now. While ``count`` bytes are on their
        way they keep its processor from computing.

        Args:
            ready: when the bytes are there.
            passes: how often the hops of a collective are waited for.
            sums: whether they are all-reduces.
        """
        if cost := times * self.rates.overheads.exchange:
            self.compute(cost)
            ready = max(ready, self.now)
        done = self.send(axis, count, ready, passes, sums)
        self.compute(count * self.rates.link(axis, sums).processor)
        return done

    def _gather(self, plan: PlanValue, unit: str, first: bool, asked: float) -> None:
        """Start a unit's gather; what comes up for it is asked for at ``asked``, without waiting for the unit before."""
        if unit in self._arrival:
            return
        if not first and unit in plan.kept:
            self._arrival[unit] = 0.0
            return
        self._fetch(plan, unit, not first, asked)
        here = self._read.pop(unit)
        if any(bucket.fetched for bucket in plan.buckets_of[unit]):
            self.compute(self.rates.overheads.unit)
        self.now, asked = max(self.now, here), max(asked, here)  # the rank waits for its disks
        ready = []
        for bucket in plan.buckets_of[unit]:
            routes = plan.routes[bucket.name]
            up = self.send("up", fetched(plan, bucket, again=not first), asked)
            ready.append(self.along(routes.gather if first else routes.again, max(up, self.now)))
        self._arrival[unit] = max(ready)

    def _fetch(self, plan: PlanValue, unit: str, again: bool, asked: float) -> None:
        """Start to read a unit's parameters, if they are on disk, unless they are read or on their way."""
        if unit not in self._read and not (again and unit in plan.kept):
            resting = [bucket for bucket in plan.buckets_of[unit] if MEMORIES[bucket.memory.param].rests]
            sizes = [whole_blocks(fetched(plan, bucket, again=again)) for bucket in resting]
            self._read[unit] = self.send("read", sum(sizes), asked) if sum(sizes) else 0.0

    def _reduce(self, plan: PlanValue, unit: str, last: bool) -> None:
        (stage,) = plan.local_stages
        again = plan.traces[stage].again if plan.traces else ()
        for bucket in () if unit in plan.left_out else plan.trained_in.get(unit, ()):
            route = plan.routes[bucket.name]
            exchanges = route.reductions if last else route.each
            done = self.along([*exchanges, *exchanges] if bucket.name in again else exchanges, self.now)
            self.reduced, self.flown = max(self.reduced, done), max(self.flown, done)
            if bucket.memory.optimizer != "device" and (last or plan.lands_each(bucket)):
                self._land(plan, bucket, done)

    def _land(self, plan: PlanValue, bucket: Bucket, ready: float) -> None:
        """A gradient goes down, and to disk if it rests there; the rank waits while more than two units are on their way."""
        size = bucket.owned * bucket.reduce_dtype.itemsize
        done = landed = self.send("down", size, ready)
        if MEMORIES[bucket.memory.grad].rests:
            if bucket.name in self.landed:  # the sum so far
                landed = self.send("read", whole_blocks(size), landed)
            landed = self.send("written", whole_blocks(size), landed)
            self.reduced = max(self.reduced, landed)  # all are written before the first update
            self.now = max(self.now, self._writing.until(landed, bucket.owned, (AHEAD + 1) * plan.largest_unit))
        self.landed[bucket.name] = landed
        if plan.step.microbatches > 1 and plan.lands_each(bucket):
            self.reduced = max(self.reduced, done)  # the host sums them, and the squares of the sum
        self.now = max(self.now, self._landing.until(done, bucket.owned, plan.most_in_flight))

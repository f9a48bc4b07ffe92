"""The operations of a program, and the virtual clock of one rank, on which they take their time.

An operation states what it sends, and `take` is its rule of cost: what it does to a rank's clock. It follows those that it
names in ``after``, by their own names, wherever these stand before it. What the processor waits for is a `Wait`, so that what
is on its way meanwhile overlaps with what stands between. A new behaviour of a step is an operation here, and the place in
`shardlib.plan.passes` or `shardlib.plan.program` where a step has it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shardlib.mesh.memories import WAYS
from shardlib.plan.machine import Link, Overheads

NOW = "now"  # names the time on the processor, where an operation names what it follows


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


class _Done(NamedTuple):
    """What operations did to a rank, by the time at which they began.

    Attributes:
        seconds: that they took, of which the rank ``computed`` some.
        free: line -> when its last message is through.
        busy: link -> seconds that it was busy.
        held: as of a clock.
    """

    seconds: float
    computed: float
    free: Mapping[str, float]
    busy: Mapping[str, float]
    held: Mapping[str, float]


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
class VirtualClock:
    """The time of one rank.

    Attributes:
        seconds: (stage, whether backward) -> unit -> seconds that a micro-batch computes.
        update: seconds of the update on the device.
        now: the time on the processor.
        computed: seconds that the processor has computed.
        when: name of an operation -> when it was done last.
        early: name of a read that has begun before its place in the program -> when it is done.
        held: what waits -> until when: "pass" the next forward or backward, "update" the update.
        busy: link -> seconds that it was busy.
        on_the_way: link -> what is on its way.
    """

    rates: Rates
    seconds: Mapping[tuple[int, bool], Mapping[str, float]]
    update: float = 0.0
    now: float = 0.0
    computed: float = 0.0
    when: dict[str, float] = field(default_factory=dict)
    early: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    on_the_way: dict[str, OnTheWay] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # line -> when its last message is through
    _known: dict[Hashable, _Done] = field(default_factory=dict)

    def after(self, names: Iterable[str]) -> float:
        """When all of the named operations were done; 0 for one that was not."""
        return max((self.now if name == NOW else self.when.get(name, 0.0) for name in names), default=0.0)

    def wait(self, when: float) -> None:
        self.now = max(self.now, when)

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def launch(self, count: float) -> None:
        """Begin operators, each of which takes a fixed time beside that of its elements."""
        if rate := self.rates.bandwidth.get("launches"):
            self.compute(count / rate)
            self.busy["launches"] = self.busy.get("launches", 0.0) + count / rate

    def send(self, link: str, count: float, ready: float, rounds: float = 1.0, sums: bool = False) -> float:
        """The time at which ``count`` bytes, ready at time ``ready``, have gone over a link.

        Args:
            rounds: how often the hops of a collective are waited for.
            sums: whether they go as all-reduces.
        """
        if link not in self.rates.bandwidth or not count:
            return ready
        rate = self.rates.link(link, sums)
        seconds, line = count / rate.bandwidth + rounds * rate.latency, self.rates.lines.get(link, link)
        self._free[line] = max(ready, self._free.get(line, 0.0)) + seconds
        self.busy[link] = self.busy.get(link, 0.0) + seconds
        return self._free[line]

    def again(self, what: Hashable, take: Callable[[], None]) -> None:
        """``take()``, or what it did before, from now on: if it finds links idle and waits for nothing of before."""
        if what in self._known:
            self._repeat(self._known[what])
            return
        now, computed, held, busy = self.now, self.computed, self.held, self.busy
        self.held, self.busy = {}, {}
        take()
        lines = {self.rates.lines.get(link, link) for link in self.busy}
        free = {line: self._free[line] - now for line in lines if line in self._free}
        done = _Done(
            self.now - now, self.computed - computed, free, self.busy, {name: t - now for name, t in self.held.items()}
        )
        self._known[what], self.now, self.computed, self.held, self.busy = done, now, computed, held, busy
        self._repeat(done)

    def _repeat(self, done: _Done) -> None:
        for name, until in done.held.items():
            self.held[name] = max(self.held.get(name, 0.0), self.now + until)
        for line, free in done.free.items():
            self._free[line] = self.now + free
        for link, seconds in done.busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + seconds
        self.now += done.seconds
        self.computed += done.computed


class Op(Protocol):
    """An operation of one rank."""

    def take(self, clock: VirtualClock) -> None:
        """Take the operation's time."""
        ...


@dataclass(frozen=True)
class Send:
    """Bytes that go over an axis to other ranks, or on one of `shardlib.mesh.memories.WAYS` between memories.

    Attributes:
        what: "parameters", "gradients", "activations", "carries" between stages, "tied gradients" between homes,
            "optimizer", "buffers", "states" or "inputs of blocks".
        link: the axis, or the way.
        when: the phase of the step, such as "each micro-batch".
        form: the dtype or the codec in which values are sent.
        bytes: payload, as of a bandwidth-optimal algorithm.
        unit: whose values they are, or "".
        collectives: that the rank takes part in with its processor; a fraction where one is divided among units.
        rounds: how often the hops of a collective are waited for.
        sums: whether it is an all-reduce.
    """

    what: str
    link: str
    when: str
    form: str
    bytes: int
    unit: str = ""
    name: str = ""
    after: tuple[str, ...] = (NOW,)
    collectives: float = 1.0
    rounds: float = 1.0
    sums: bool = False

    @property
    def moves(self) -> bool:
        """Whether it is between memories of the rank."""
        return self.link in WAYS

    def take(self, clock: VirtualClock) -> None:
        done = clock.early.pop(self.name, None)
        clock.when[self.name] = self.begin(clock) if done is None else done

    def begin(self, clock: VirtualClock) -> float:
        """When it is done, if it begins now."""
        ready = clock.after(self.after)
        if self.moves:
            return clock.send(self.link, self.bytes, ready)
        if cost := self.collectives * clock.rates.overheads.exchange:
            clock.compute(cost)
            ready = max(ready, clock.now)
        done = clock.send(self.link, self.bytes, ready, self.rounds, self.sums)
        # While bytes are on their way they keep the processor from computing.
        clock.compute(self.bytes * clock.rates.link(self.link, self.sums).processor)
        return done


@dataclass(frozen=True)
class ReadAhead:
    """Reads that begin here, before their places in the program, unless they have begun."""

    reads: tuple[Send, ...]

    def take(self, clock: VirtualClock) -> None:
        for read in self.reads:
            if read.name not in clock.early:
                clock.early[read.name] = read.begin(clock)


@dataclass(frozen=True)
class Compute:
    """A unit's part of a micro-batch's forward or backward in a stage.

    Attributes:
        share: of the unit's seconds.
        launches: operators that begin.
        recomputed: blocks that are computed again.
    """

    stage: int
    unit: str
    backward: bool
    share: float = 1.0
    launches: float = 0.0
    recomputed: float = 0.0

    def take(self, clock: VirtualClock) -> None:
        clock.compute(self.share * clock.seconds[self.stage, self.backward][self.unit])
        clock.launch(self.launches)
        clock.compute(self.recomputed * clock.rates.overheads.recompute)


@dataclass(frozen=True)
class Overhead:
    """Time of Python: see `shardlib.plan.machine.Overheads`."""

    of: str
    times: int = 1

    def take(self, clock: VirtualClock) -> None:
        clock.compute(self.times * getattr(clock.rates.overheads, self.of))


@dataclass(frozen=True)
class Timestamp:
    """A time that later operations follow."""

    name: str

    def take(self, clock: VirtualClock) -> None:
        clock.when[self.name] = clock.now


@dataclass(frozen=True)
class Wait:
    """The processor waits for operations."""

    names: tuple[str, ...]

    def take(self, clock: VirtualClock) -> None:
        clock.wait(clock.after(self.names))


@dataclass(frozen=True)
class Hold:
    """Before the next "pass" (a forward or backward), or before the "update", the rank waits for an operation."""

    until: tuple[str, ...]
    after: str

    def take(self, clock: VirtualClock) -> None:
        for what in self.until:
            clock.held[what] = max(clock.held.get(what, 0.0), clock.after((self.after,)))


@dataclass(frozen=True)
class Resume:
    """The rank waits for what was held until here."""

    until: str

    def take(self, clock: VirtualClock) -> None:
        clock.wait(clock.held.get(self.until, 0.0))


@dataclass(frozen=True)
class Limit:
    """The rank waits until what was sent over a link, a named operation as the last, is at most ``most`` elements."""

    link: str
    after: str
    elements: int
    most: int

    def take(self, clock: VirtualClock) -> None:
        queue = clock.on_the_way.setdefault(self.link, OnTheWay())
        clock.wait(queue.until(clock.after((self.after,)), self.elements, self.most))


@dataclass(frozen=True)
class Scalars:
    """The step's loss, norm and flags, summed over an axis in one message, whose bytes nobody counts."""

    axis: str

    def take(self, clock: VirtualClock) -> None:
        clock.now += clock.rates.link(self.axis, sums=True).latency


@dataclass(frozen=True)
class Update:
    """The optimizer's update, on the device; or of a bucket whose states are elsewhere, on the host.

    Attributes:
        bytes: that the host reads and writes.
    """

    memory: str = "device"
    bucket: str = ""
    bytes: float = 0.0
    name: str = ""
    after: tuple[str, ...] = (NOW,)

    def take(self, clock: VirtualClock) -> None:
        if self.memory == "device":
            clock.compute(clock.update)
        else:
            clock.when[self.name] = clock.send("update", self.bytes, clock.after(self.after))

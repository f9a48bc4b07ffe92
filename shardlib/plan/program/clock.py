"""The virtual clock of one rank, on which the operations of a program take their time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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

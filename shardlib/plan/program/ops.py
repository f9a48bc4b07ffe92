"""The operations of a program. Each states what it sends, and `take` is its rule of cost: what it does to a rank's clock.

An operation follows those that it names in ``after``, by their own names, wherever these stand before it. What the processor
waits for is a `Wait`, so that what is on its way meanwhile overlaps with what stands between. A new behaviour of a step is an
operation here, and the place in `shardlib.plan.program.passes` or `shardlib.plan.program.update` where a step has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardlib.mesh.memories import WAYS
from shardlib.plan.program.clock import NOW, OnTheWay, VirtualClock


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

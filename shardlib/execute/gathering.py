"""When units are gathered and when they are released.

The touches of a step form a sequence of runs (consecutive touches of one unit). While the ranks agree on each gather,
the unit in use and the one before it are kept. A run that was alike on all ranks is then the trace: from the next one
on, at the first touch of a unit those that are neither in use nor next are released, and the next one is sent for, so
that at most two neighbouring units are alive. Both rules gather equally often.

A rank whose touches leave the trace goes on with it for the others' sake, and gets zeros for what it touches: what it
computes is thrown away. See `shardlib.execute.record`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from shardlib.execute.record import Entry, Record


class Gatherable(Protocol):
    """A unit whose parameters come and go."""

    name: str

    @property
    def gathers(self) -> bool:
        """Whether its parameters come and go at all: some may be here all the time."""
        ...

    def fetch(self) -> None:
        """Send for the whole parameters; does nothing when they are here or on their way."""
        ...

    def arrive(self) -> None:
        """Return once the whole parameters are here."""
        ...

    def release(self) -> None:
        """Let go of the whole parameters."""
        ...

    def serve(self) -> None:
        """Take part in a gather for other ranks; what is here stays as it is."""
        ...

    def stand_in(self) -> None:
        """Put zeros where the whole parameters would be."""
        ...


class Reductions(Protocol):
    """The reductions of a backward, in the order they start: see `shardlib.execute.gradients.Gradients`."""

    @property
    def started(self) -> Sequence[str]: ...

    def ready(self) -> int:
        """How many have started or could."""
        ...

    def advance(self) -> None:
        """Start those that can and may."""
        ...

    def skip_to(self, count: int) -> None:
        """Start reductions until this many have, with zeros for what has not come."""
        ...


class Gathering:
    """Decides, touch by touch, what to fetch and what to release.

    Attributes:
        record: what earlier runs showed.
        current: the unit of the present run; touching it again needs no decision.
        fetched: the units gathered since `begin`, in order.
        touched: the units used since `begin`.
        reductions: while gradients come, what reduces them.
        strayed: whether this rank has left the trace since `begin`.
    """

    def __init__(self, units: dict[str, Gatherable], record: Record, prefetch: bool) -> None:
        self._units, self.record, self._prefetch = units, record, prefetch
        # Where none is there is nothing to agree on but the first reductions.
        self._gathers = any(unit.gathers for unit in units.values())
        self._names = list(units)
        self._here: dict[str, Gatherable] = {}
        self.current: Gatherable | None = None
        self._reset(None)

    def _reset(self, trace: list[Entry] | None) -> None:
        self._trace = trace  # None while the ranks agree on each gather
        self._runs: list[Entry] = []
        self._sum = 0  # a checksum of the runs
        self._allowed = 0
        self._apart: set[str] | None = None  # units that ranks used otherwise; None while they are alike
        self._late = False
        self.fetched: list[str] = []
        self.touched: set[str] = set()
        self.reductions: Reductions | None = None
        self.strayed = False

    def begin(self) -> None:
        """Start a micro-batch."""
        self._reset(None if self.record.agreeing else self.record.trace)

    @property
    def limit(self) -> int | None:
        """How many reductions may have been started by now, so that all ranks start them between the same gathers."""
        if not self._gathers:
            return None
        if self._trace is None:
            return self._allowed
        return self._trace[len(self._runs)][1] if len(self._runs) < len(self._trace) else None

    def touch(self, unit: Gatherable) -> None:
        """Make ``unit`` the current one, its parameters here."""
        previous = self.current.name if self.current else None
        self.touched.add(unit.name)
        if self._trace is not None and not self._at(unit.name):
            self.strayed = True
        if self._trace is not None and not self.strayed:
            self._follow(unit)
            return
        self._go_on()
        self.current = unit
        self._keep({unit.name, previous})
        if self.strayed:
            if unit.name not in self._here:
                self._here[unit.name] = unit
                unit.stand_in()
            return
        self._note(unit.name)
        if unit.name not in self._here:
            self._agree(self._names.index(unit.name))

    def turn(self) -> None:
        """Forward is over. Everything is released, and what backward needs first is sent for."""
        self.rest()
        if self._trace is not None and self._prefetch and (upcoming := self._upcoming()):
            self._fetch(self._units[upcoming])

    def rest(self) -> None:
        """Other micro-batches come first. Everything is released, and nothing is sent for until this one goes on."""
        self.strayed |= self._trace is not None and not self._at(None)
        self._pause()
        self._note(None)

    def finish(self, late: Sequence[str] = ()) -> tuple[str, ...]:
        """The run is over, on this rank and then on all.

        Returns those of ``late``, of all ranks together, whose gradients are to be reduced once more.
        """
        if self._trace is not None:
            self.strayed |= len(self._runs) < len(self._trace) or tuple(late) != self.record.late
            self._pause()
            self.record.strayed |= self.strayed
            return self.record.late
        self._pause(bool(late))
        found = self.record.unite(late) if self._late else ()
        self.record.note(self._runs, found, self._apart if self._gathers else None)
        return found

    def end(self) -> None:
        """Backward is over, or failed. Everything is released."""
        self._keep(set())
        self.current = None

    def begin_reductions(self, reductions: Reductions) -> None:
        """Gradients are about to come."""
        self.reductions = reductions
        self._settle()

    def agree_to_reduce(self, unit: str) -> None:
        """In the first backward: settle the order of reductions, unless this unit's is what is next on every rank."""
        self._agree(len(self._names) + self._names.index(unit))

    def unused(self, unit: str) -> bool:
        """Whether no gradient can come for a unit: it is gathered for use, and has not been used."""
        return self._units[unit].gathers and unit not in self.touched

    def _agree(self, what: int, late: bool = False) -> bool:
        """Tell the other ranks what is next on this one, and take part in all they gather; whether it is the same for all.

        ``what``: a unit to be gathered, by number; one to be reduced, by number + units; or ``_END``.
        """
        ready = self.reductions.ready() if self.reductions is not None else 0
        words = self.record.compare(what, self._sum, ready, late)
        nexts, checksums, counts, lates = zip(*words, strict=True)
        self._late = any(lates)
        alike = len(set(nexts)) == 1
        if not alike or len(set(checksums)) > 1:
            named = {self._names[number % len(self._names)] for number in nexts if number != _END}
            self._apart = (self._apart or set()) | named
            self._settle()
        self._allowed = min(counts)
        if self.reductions is not None:
            self.reductions.advance()
        for number in sorted({number for number in nexts if 0 <= number < len(self._names)}):
            unit = self._units[self._names[number]]
            self.fetched.append(unit.name)
            if number == what:
                self._here[unit.name] = unit
                unit.fetch()
                unit.arrive()
            else:
                unit.serve()
        return alike

    def _settle(self) -> None:
        if self._apart is not None and self.reductions is not None and self.record.order is None:
            touched = [name for name, _ in self._runs if name is not None]
            self.record.settle(self.reductions.started, touched)

    def _pause(self, late: bool = False) -> None:
        """Nothing more comes for now: serve the ranks for which something does, then release everything."""
        if self._trace is not None:
            self._go_on()
        elif self._gathers or self.reductions is not None:
            while not self._agree(_END, late):
                pass
        self.end()

    def _at(self, name: str | None) -> bool:
        """Whether this is what the trace says is next."""
        assert self._trace is not None
        place = len(self._runs)
        return self._trace[place : place + 1] == [(name, self._count())] or self.strayed

    def _go_on(self) -> None:
        """On a rank that has strayed: make what is left of the trace's exchanges, as far as the others do by themselves."""
        if not self.strayed or self._trace is None or self._upcoming() is None:
            return
        while (name := self._upcoming()) is not None:
            if self.reductions is not None:
                self.reductions.skip_to(self._trace[len(self._runs)][1])
            self._follow(self._units[name])
        self.end()

    def _follow(self, unit: Gatherable) -> None:
        self._note(unit.name)
        self.current = unit
        upcoming = self._upcoming()
        self._keep({unit.name, upcoming})
        self._fetch(unit)
        unit.arrive()
        if upcoming is not None and self._prefetch:
            self._fetch(self._units[upcoming])

    def _upcoming(self) -> str | None:
        """The trace's next unit."""
        place = len(self._runs)
        return self._trace[place][0] if self._trace is not None and place < len(self._trace) else None

    def _note(self, name: str | None) -> None:
        entry = name, self._count()
        self._runs.append(entry)
        if self._trace is None:
            self._sum = zlib.crc32(repr(entry).encode(), self._sum) >> 1

    def _count(self) -> int:
        return len(self.reductions.started) if self.reductions is not None else 0

    def _fetch(self, unit: Gatherable) -> None:
        if unit.name not in self._here:
            self._here[unit.name] = unit
            self.fetched.append(unit.name)
            unit.fetch()

    def _keep(self, names: set[str | None]) -> None:
        for name in [name for name in self._here if name not in names]:
            self._here.pop(name).release()


_END = -1

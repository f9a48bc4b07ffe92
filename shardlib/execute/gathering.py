"""Decisions on when units are gathered and when they are released.

Consecutive touches of one unit form a visit, and the visits of a micro-batch form a run. At first the ranks agree on each
gather before it is made, and keep the unit in use and the one before it. A run that was the same on all ranks becomes the
trace of the runs after it: at the first touch of a unit, all units but this one and the trace's next one are released, and
the gather of the next one is started, so that at most two neighbouring units are alive. (A second one ahead was measured over
slow links: steps take as long where units are equal and 0 to 2 % less where they are not, for a unit more on the device.) The
next few units are announced, so that what is on disk is read meanwhile. Both rules gather equally often. While a tile of a
leaf is in use, the unit that the leaf belongs to stays as it is (gathered, or not): it is often used again right after the
tiles. What the plan keeps (`shardlib.zero`'s ``keep``) is not released before backward uses it.

A step that leaves out layers follows the trace less the units of those layers, on all ranks alike. There is a trace of all
units first: while the ranks agree on each gather, nothing is left out (see `shardlib.execute.layer_dropping`).

A rank whose touches leave the trace still makes the trace's gathers, since the other ranks wait for them, and computes with
zeros: its results will be discarded. See `shardlib.execute.collective_order`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from shardlib.errors import RankMismatch
from shardlib.execute.collective_order import Record, Visit
from shardlib.mesh.memories import AHEAD


class Gatherable(Protocol):
    """A unit whose parameters are gathered and released."""

    name: str
    home: str | None  # of a leaf's tile: the unit that the leaf belongs to

    @property
    def gathers(self) -> bool:
        """Whether the parameters must be gathered for use; if not, the rank holds them all the time."""
        ...

    def announce(self) -> None:
        """Prepare for a `fetch` that is a few units away."""
        ...

    def fetch(self) -> None:
        """Start to gather the parameters, unless they are gathered or under way."""
        ...

    def arrive(self) -> None:
        """Wait until the parameters are gathered."""
        ...

    def release(self) -> None:
        """Free the gathered parameters."""
        ...

    def serve(self) -> None:
        """Take part in a gather that other ranks need, without keeping its result."""
        ...

    def stand_in(self) -> None:
        """Use zeros as the gathered parameters."""
        ...


class BackwardReductions(Protocol):
    """The reductions of a backward, in the order they start: see `shardlib.execute.gradients.Gradients`."""

    @property
    def started(self) -> Sequence[str]: ...

    def ready(self) -> int:
        """The number of reductions that have started or could start."""
        ...

    def advance(self) -> None:
        """Start the reductions that can start, up to `Gathering.limit`."""
        ...

    def skip_to(self, count: int) -> None:
        """Start reductions until ``count`` have started, with zeros for gradients that are not there."""
        ...


class Gathering:
    """Decides, touch by touch, which units to gather and which to release.

    Args:
        kept: units that are not released between their use in forward and the first one in backward.

    Attributes:
        record: what earlier runs showed.
        current: the unit of the present visit; touching it again needs no decision.
        skipped: the units that the step leaves out: neither gathered nor reduced.
        idle: the units that it leaves out and yet gathers and reduces, as there is no trace: their gradients are zeros.
        fetched: the units gathered since `begin`, in order.
        turned: how many of them in forward; None until it ends.
        touched: the units used since `begin`.
        reductions: the reductions of the backward, while it runs; else None.
        strayed: whether this rank has left the trace since `begin`.
    """

    record: Record
    strayed: bool

    def __init__(
        self, units: dict[str, Gatherable], record: Record, prefetch: bool, kept: Collection[str] = ()
    ) -> None:
        self._units, self.record, self._prefetch, self._kept = units, record, prefetch, kept
        # If no unit gathers, the ranks only have to agree on the order of the first reductions.
        self._gathers = any(unit.gathers for unit in units.values())
        self._names = list(units)
        self._here: dict[str, Gatherable] = {}
        self.current: Gatherable | None = None
        self.skipped: frozenset[str] = frozenset()
        self.idle: frozenset[str] = frozenset()
        self._reset(None)

    def _reset(self, trace: list[Visit] | None) -> None:
        self._trace = trace  # None while the ranks agree on each gather
        self._visits: list[Visit] = []
        self._sum = 0  # a checksum of the visits
        self._allowed = 0
        self._differing: set[str] | None = None  # units that ranks used differently; None while there is no difference
        self._late = False
        self._staying = set(self._kept)  # less those that backward has used
        self.fetched: list[str] = []
        self.turned: int | None = None
        self.touched: set[str] = set()
        self.reductions: BackwardReductions | None = None
        self.strayed = False

    def begin(self, left_out: frozenset[str] = frozenset(), computed: bool = False) -> None:
        """Start a micro-batch.

        Args:
            left_out: the units that it leaves out.
            computed: whether they are computed all the same, for the sake of their exchanges.
        """
        nothing: frozenset[str] = frozenset()
        self.skipped, self.idle = (nothing, left_out) if computed else (left_out, nothing)
        self._reset(None if self.record.agreeing else self.record.less(self.skipped))
        self._announce()

    @property
    def order(self) -> list[str] | None:
        """The units whose reductions start in this micro-batch, in order; None before the first backward."""
        order = self.record.order
        return [unit for unit in order if unit not in self.skipped] if order is not None and self.skipped else order

    @property
    def limit(self) -> int | None:
        """The number of reductions that may have started by now, so that all ranks start them between the same gathers."""
        if not self._gathers:
            return None
        if self._trace is None:
            return self._allowed
        return self._trace[len(self._visits)][1] if len(self._visits) < len(self._trace) else None

    def touch(self, unit: Gatherable) -> None:
        """Make ``unit`` the current one, with its parameters gathered."""
        previous = self.current
        self.touched.add(unit.name)
        if self._trace is not None and not self._at(unit.name):
            self.strayed = True
        if self._trace is not None and not self.strayed:
            self._follow(unit)
            return
        self._go_on()
        self.current = unit
        self._keep({unit.name, *((previous.name, previous.home) if previous else ())})
        if self.strayed:
            if unit.name not in self._here:
                self._here[unit.name] = unit
                self._staying.discard(unit.name)  # the trace's backward, if it uses the unit, gathers it
                unit.stand_in()
            return
        self._note(unit.name)
        if unit.name not in self._here:
            self._agree(self._names.index(unit.name))

    def meet(self) -> None:
        """Come together before an exchange of the function itself, of tokens with experts.

        While the ranks agree on each gather, this rank takes part in those of ranks that are not at the exchange yet.

        Raises:
            RankMismatch: other ranks make no such exchange any more; on all ranks.
        """
        if self._trace is None and self._gathers:
            self.meet_to_read()

    def meet_to_read(self) -> None:
        """`meet` before the first read of a further tree, even if no unit has been gathered so far."""
        if self._trace is None:
            self._sum = zlib.crc32(b"exchange", self._sum) >> 1
            while not self._agree(_MEETING):
                pass

    def admit(self, units: Mapping[str, Gatherable]) -> bool:
        """Take further units, which all ranks do at one place: where they meet. On a rank that follows a trace, which has
        none of them, they are not taken: it strays when it touches them."""
        if self._trace is not None:
            return False
        self._units.update(units)
        self._names += units
        self._gathers = True
        return True

    def turn(self) -> None:
        """End the forward: release all units that are not kept, and start to gather the one that backward needs first."""
        self.rest()
        if self._trace is not None and self._prefetch and (upcoming := self._upcoming()):
            self._fetch(self._units[upcoming])

    def rest(self) -> None:
        """Release all units that are not kept, and gather none until this micro-batch goes on; others run meanwhile."""
        self.strayed |= self._trace is not None and not self._at(None)
        if self.turned is None:
            self.turned = len(self.fetched)
        self._pause()
        self._note(None)

    def finish(self, late: Sequence[str] = ()) -> tuple[str, ...]:
        """End the run; returns once it is over on all ranks.

        Args:
            late: buckets with gradients that came after the bucket's reduction had started.

        Returns:
            The late buckets of all ranks, which are reduced once more.
        """
        if self._trace is not None:
            expected = self.record.late_of(self.skipped)
            self.strayed |= len(self._visits) < len(self._trace) or tuple(late) != expected
            self._pause()
            self.record.strayed |= self.strayed
            return expected
        self._pause(bool(late))
        all_late = self.record.unite(late) if self._late else ()
        self.record.note(self._visits, all_late, self._differing if self._gathers else None)
        return all_late

    def end(self) -> None:
        """Release every unit but those that are kept for backward."""
        self._keep(set())
        self.current = None

    def close(self) -> None:
        """End the micro-batch: release every unit, and let go of its gradients."""
        self._staying.clear()
        self.end()
        self.reductions = None

    def begin_reductions(self, reductions: BackwardReductions) -> None:
        """Start a backward, whose gradients ``reductions`` reduces."""
        self.reductions = reductions
        self._settle()

    def agree_to_reduce(self, unit: str) -> None:
        """In the first backward: settle the order of reductions, unless this unit's reduction is next on every rank."""
        self._agree(len(self._names) + self._names.index(unit))

    def unused(self, unit: str) -> bool:
        """Whether a unit cannot have a gradient: it must be gathered for use, and has not been used."""
        return self._units[unit].gathers and unit not in self.touched

    def _agree(self, what: int, late: bool = False) -> bool:
        """Exchange with all ranks what each does next, and make all their gathers; returns whether all do the same.

        Args:
            what: the number of the unit that this rank gathers next; that number plus the number of units if it reduces the
                unit; or ``_MEETING`` or ``_END``.
            late: whether this rank has late gradients (see `finish`).
        """
        ready = self.reductions.ready() if self.reductions is not None else 0
        words = self.record.compare(what, self._sum, ready, late)
        nexts, checksums, counts, lates = zip(*words, strict=True)
        self._late = any(lates)
        same = len(set(nexts)) == 1
        if not same and max(nexts) < 0:
            raise RankMismatch(
                f"{nexts.count(_MEETING)} of {len(nexts)} ranks call a layer of experts or read a further sharded "
                f"tree, and the others end the {'loss' if self.reductions is None else 'backward'} first. Do both "
                "equally often on every rank, if need be without rows"
            )
        if not same or len(set(checksums)) > 1:
            units = {self._names[number % len(self._names)] for number in nexts if number >= 0}
            self._differing = (self._differing or set()) | units
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
        return same

    def _settle(self) -> None:
        if self._differing is not None and self.reductions is not None and self.record.order is None:
            touched = [name for name, _ in self._visits if name is not None]
            self.record.settle(self.reductions.started, touched)

    def _pause(self, late: bool = False) -> None:
        """Take part in the other ranks' gathers until no rank gathers any more for now; then release every unit."""
        if self._trace is not None:
            self._go_on()
        elif self._gathers or self.reductions is not None:
            while not self._agree(_END, late):
                pass
        self.end()

    def _at(self, name: str | None) -> bool:
        """Whether ``name`` is the trace's next unit, with as many reductions started; True on a rank that has strayed."""
        assert self._trace is not None
        position = len(self._visits)
        return self._trace[position : position + 1] == [(name, self._count())] or self.strayed

    def _go_on(self) -> None:
        """On a rank that has strayed: make the trace's remaining gathers up to its next pause, as the other ranks do."""
        if not self.strayed or self._trace is None or self._upcoming() is None:
            return
        while (name := self._upcoming()) is not None:
            if self.reductions is not None:
                self.reductions.skip_to(self._trace[len(self._visits)][1])
            self._follow(self._units[name])
        self.end()

    def _follow(self, unit: Gatherable) -> None:
        self._note(unit.name)
        self.current = unit
        upcoming = self._upcoming()
        self._keep({unit.name, upcoming, unit.home})
        self._fetch(unit)
        unit.arrive()
        if upcoming is not None and self._prefetch:
            self._fetch(self._units[upcoming])
        self._announce()

    def _announce(self) -> None:
        """Announce the trace's next units, beyond a pause too."""
        if self._trace is None or not self._prefetch:
            return
        following = (self._trace[position][0] for position in range(len(self._visits), len(self._trace)))
        for name in itertools.islice((name for name in following if name is not None), AHEAD):
            if name not in self._here:
                self._units[name].announce()

    def _upcoming(self) -> str | None:
        """The trace's next unit; None at its end, or without a trace."""
        position = len(self._visits)
        return self._trace[position][0] if self._trace is not None and position < len(self._trace) else None

    def _note(self, name: str | None) -> None:
        visit = name, self._count()
        self._visits.append(visit)
        if self.reductions is not None and name is not None:
            self._staying.discard(name)
        if self._trace is None:
            self._sum = zlib.crc32(repr(visit).encode(), self._sum) >> 1

    def _count(self) -> int:
        return len(self.reductions.started) if self.reductions is not None else 0

    def _fetch(self, unit: Gatherable) -> None:
        if unit.name not in self._here:
            self._here[unit.name] = unit
            self.fetched.append(unit.name)
            unit.fetch()

    def _keep(self, names: set[str | None]) -> None:
        for name in [name for name in self._here if name not in names and name not in self._staying]:
            self._here.pop(name).release()


_END, _MEETING = -1, -2

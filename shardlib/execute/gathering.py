"""When units are gathered and when they are released.

The touches of a step form a sequence of runs (consecutive touches of one unit). The first step keeps the unit in
use and the one before it. Its sequence is then the trace: from the next step on, at the first touch of a run the
units that are neither in use nor next are released, and the next one is sent for, so that at most two neighbouring
units are alive. Both rules gather equally often. A step that leaves the trace falls back to the first rule.
"""

from __future__ import annotations

from typing import Protocol


class Gatherable(Protocol):
    """A unit whose parameters come and go."""

    name: str

    def fetch(self) -> None:
        """Send for the whole parameters; does nothing when they are here or on their way."""
        ...

    def arrive(self) -> None:
        """Return once the whole parameters are here."""
        ...

    def release(self) -> None:
        """Let go of the whole parameters."""
        ...


class Gathering:
    """Decides, touch by touch, what to fetch and what to release.

    Attributes:
        current: the unit of the present run; touching it again needs no decision.
        runs: the units touched since `begin`, one entry per run; None where other work came between.
        fetched: the units gathered since `begin`, in order.
        left: where the trace was left: the unit touched, and the one expected (None: no more); None while it is followed.
    """

    def __init__(self, units: dict[str, Gatherable], prefetch: bool) -> None:
        self._units = units
        self._prefetch = prefetch
        self._trace: list[str | None] | None = None
        self._here: dict[str, Gatherable] = {}
        self.current: Gatherable | None = None
        self.runs: list[str | None] = []
        self.fetched: list[str] = []
        self.left: tuple[str, str | None] | None = None

    def begin(self, trace: list[str | None] | None) -> None:
        """Start a micro-batch that is expected to follow ``trace`` (None: unknown)."""
        self._trace = trace
        self.runs, self.fetched, self.left = [], [], None

    def touch(self, unit: Gatherable) -> None:
        """Make ``unit`` the current one, its parameters here."""
        previous = self.current.name if self.current else None
        self.runs.append(unit.name)
        self.current = unit
        place = len(self.runs)
        expected = (self._trace or [])[place - 1 : place]
        if self._trace is not None and expected != [unit.name]:
            self._trace, self.left = None, (unit.name, expected[0] if expected else None)
        upcoming = self._trace[place] if self._trace is not None and place < len(self._trace) else None
        self._keep({unit.name, previous if self._trace is None else upcoming})
        self._fetch(unit)
        unit.arrive()
        if upcoming is not None and self._prefetch:
            self._fetch(self._units[upcoming])

    def turn(self) -> None:
        """Forward is over. Everything is released, and what backward needs first is sent for."""
        self.end()
        upcoming = (
            self._trace[len(self.runs)] if self._trace is not None and len(self.runs) < len(self._trace) else None
        )
        if upcoming is not None and self._prefetch:
            self._fetch(self._units[upcoming])

    def rest(self) -> None:
        """Other micro-batches come first. Everything is released, and nothing is sent for until this one goes on."""
        self.end()
        self.runs.append(None)

    def end(self) -> None:
        """Backward is over, or failed. Everything is released."""
        self._keep(set())
        self.current = None

    def _fetch(self, unit: Gatherable) -> None:
        if unit.name not in self._here:
            self._here[unit.name] = unit
            self.fetched.append(unit.name)
            unit.fetch()

    def _keep(self, names: set[str | None]) -> None:
        for name in [name for name in self._here if name not in names]:
            self._here.pop(name).release()

"""The exchanges of a step: what one rank notes of each, by a transport around each axis' own; and who came when, of all
ranks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.mesh.mesh import Traffic, coordinates, rank_of
from shardlib.mesh.transport import Group, Work
from shardlib.mesh.transport.activity import here
from shardlib.mesh.transport.base import WrappedGroup
from shardlib.report.profile.timeline import Part, StepTimeline

MESSAGES = ("send", "recv")


@dataclass(slots=True)
class ProfiledExchange:
    """One exchange, as one rank made it.

    Attributes:
        op: the operation.
        axis: the mesh axis.
        name: what it is for.
        payload: bytes that this rank sends, as plans count them.
        scalars: bytes of a step's own numbers, which payloads exclude.
        peer: of a message, the other rank along the axis; else None.
        tag: of a message.
        start: when this rank began it, by `time.perf_counter`.
        end: when this rank had its result; None while it has not waited for it.
        waited: seconds that this rank waited for it.
    """

    op: str
    axis: str
    name: str
    payload: int
    scalars: int
    peer: int | None
    tag: int
    start: float
    end: float | None = None
    waited: float = 0.0


class TimedGroup(WrappedGroup):
    """A transport that notes what goes through another one.

    Args:
        traffic: of the rank, from which bytes are read.
        exchanges: where they are noted, in the order of the calls.
    """

    def __init__(
        self, axis: str, group: Group, traffic: Traffic, timeline: StepTimeline, exchanges: list[ProfiledExchange]
    ) -> None:
        super().__init__(group)
        self._axis, self._traffic, self._timeline, self._exchanges = axis, traffic, timeline, exchanges
        self._before = self._sent()

    def _sent(self) -> tuple[int, int]:
        """Bytes of payload and of scalars that this rank has sent along the axis."""
        return self._traffic.payload.get(self._axis, 0), self._traffic.scalars.get(self._axis, 0)

    def exchange(self, op: str, out: Any, inp: Any, start: Callable[[], Work], about: Any = None) -> Work:
        # All of this runs with caches full of tensors, so that each function it calls costs: context managers are too much.
        timeline, axis, name = self._timeline, self._axis, here().path
        # The caller has counted this exchange, and nothing else since the one before.
        (payload, scalars), (payload_before, scalars_before) = sent, _ = self._sent(), self._before
        self._before = sent
        peer, tag = about if op in MESSAGES else (None, 0)
        made = ProfiledExchange(
            op, axis, name, payload - payload_before, scalars - scalars_before, peer, tag, time.perf_counter()
        )
        self._exchanges.append(made)
        place = timeline.open(Part("communication", axis, name))
        try:
            work = start()
        finally:
            timeline.close(place)

        def finish() -> None:
            began, place = time.perf_counter(), timeline.open(Part("wait", axis, name))
            try:
                work.wait()
            finally:
                timeline.close(place)
            made.end = time.perf_counter()
            made.waited = made.end - began

        return Work(finish)


@dataclass(frozen=True)
class GroupExchange:
    """One exchange, as all of its ranks made it.

    Attributes:
        of: rank -> its part.
    """

    of: Mapping[int, ProfiledExchange]

    @property
    def first(self) -> ProfiledExchange:
        return next(iter(self.of.values()))

    @property
    def name(self) -> str:
        """What it is for."""
        return self.first.name or next((exchange.name for exchange in self.of.values() if exchange.name), "")

    @property
    def op(self) -> str:
        """The operation; of a message "send"."""
        return MESSAGES[0] if self.first.op in MESSAGES else self.first.op

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.of, key=lambda rank: self.of[rank].start)

    @property
    def late(self) -> float:
        """Seconds by which the last rank came after the first."""
        starts = [exchange.start for exchange in self.of.values()]
        return max(starts) - min(starts)

    @property
    def payload(self) -> int:
        """Bytes that a rank sends, of the ranks the most."""
        return max(exchange.payload for exchange in self.of.values())

    @property
    def seconds(self) -> float:
        """From the last rank's arrival until the first rank had its result; 0 if none waited for it."""
        ends = [exchange.end for exchange in self.of.values() if exchange.end is not None]
        return max(0.0, min(ends) - self.of[self.last].start) if ends else 0.0

    @property
    def waited(self) -> float:
        """Seconds that a rank waited, of the ranks the most."""
        return max(exchange.waited for exchange in self.of.values())


def meetings(sizes: Mapping[str, int], ranks: Sequence[Sequence[ProfiledExchange]]) -> list[GroupExchange]:
    """The exchanges of one step of all ranks, by those of each, in the order in which they began.

    All ranks of a group make the same collectives in the same order; messages between two ranks come in the order in which
    they are sent.
    """
    found: defaultdict[Hashable, dict[int, ProfiledExchange]] = defaultdict(dict)
    for rank, exchanges in enumerate(ranks):
        for key, exchange in _keyed(sizes, rank, exchanges):
            found[key][rank] = exchange
    return sorted(
        (GroupExchange(of) for of in found.values()), key=lambda meeting: min(e.start for e in meeting.of.values())
    )


def _keyed(
    sizes: Mapping[str, int], rank: int, exchanges: Sequence[ProfiledExchange]
) -> Iterator[tuple[Hashable, ProfiledExchange]]:
    """Each exchange of a rank with a key that it has on the other ranks too."""
    coords = coordinates(sizes, rank)
    numbers: Counter[Hashable] = Counter()
    for exchange in exchanges:
        if exchange.peer is None:
            series: Hashable = exchange.axis, rank_of(sizes, coords | {exchange.axis: 0})
        else:
            peer = rank_of(sizes, coords | {exchange.axis: exchange.peer})
            series = exchange.axis, *((rank, peer) if exchange.op == MESSAGES[0] else (peer, rank))
        numbers[series] += 1
        yield (series, numbers[series]), exchange

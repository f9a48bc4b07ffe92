"""The exchanges of all ranks, matched: who came when to each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardlib.mesh.mesh import coordinates, rank_of
from shardlib.report.profile.exchanges import MESSAGES, ProfiledExchange
from shardlib.report.profile.recording import RecordedStep


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


def meetings(sizes: Mapping[str, int], ranks: Sequence[RecordedStep]) -> list[GroupExchange]:
    """The exchanges of one step of every rank, in the order in which they began.

    All ranks of a group make the same collectives in the same order; messages between two ranks come in the order in which
    they are sent.
    """
    found: defaultdict[Hashable, dict[int, ProfiledExchange]] = defaultdict(dict)
    for rank, step in enumerate(ranks):
        for key, exchange in _keyed(sizes, rank, step.exchanges):
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

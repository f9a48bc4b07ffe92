"""Slots: where a rank computes which experts, of which hot ones have a second copy on another rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slots:
    """The slots of a layer: the places of the ranks in which its experts are computed, rank by rank.

    An expert's rows are computed in two products, of the rows that come from either half of the ranks. Without a replica both
    are computed at the expert's seat; with one, that of its own rank's half there, and that of the other half at the replica.
    So two numbers are added up for a weight's gradient, and they are the same two wherever they are computed.

    A rank has a slot for each of its experts and the first half of the ranks, as many for the second half, and its spare
    slots. Slots are numbered through, and spare slots by themselves. A spare slot without a replica has a copy of its rank's
    first expert, to which no rows go; so what ranks call does not depend on replicas.

    Attributes:
        seats: of each expert: the row of the layer's leaves.
        replicas: of each expert: the spare slot with its second copy, −1 for none. One that the ranks do not have is none.
        ranks: over which experts are dealt out.
        spare: slots of a rank.

    Raises:
        ValueError: two experts with the same seat, or with the same spare slot.

    >>> from shardlib.nn.moe.slots import Slots
    >>> slots = Slots(seats=(0, 1), replicas=(1, -1), ranks=2, spare=1)  # each rank has 3 slots: two halves and a spare one
    >>> slots.of_rows(0), slots.of_rows(1)  # rank 1 sends its rows for expert 0 to its own spare slot
    ([0, 3], [5, 4])
    >>> slots.owners, slots.rows(0)
    ((0, 0), [0, 0])
    """

    seats: tuple[int, ...]
    replicas: tuple[int, ...]
    ranks: int
    spare: int

    def __post_init__(self) -> None:
        copies = [slot for slot in self.replicas if slot >= 0]
        if sorted(self.seats) != list(range(len(self.seats))) or len(set(copies)) < len(copies):
            raise ValueError(
                f"experts have seats {list(self.seats)} and replicas in spare slots {list(self.replicas)}: seats must be a "
                "permutation, and a slot has one expert; shardlib.relayout writes such"
            )

    @classmethod
    def assumed(cls, experts: int, ranks: int, spare: int) -> Slots:
        """Slots for a plan: every spare slot has an expert of a rank in the other half."""
        others = [(slot // spare + ranks // 2) % ranks * (experts // ranks) for slot in range(ranks * spare)]
        replicas = [-1] * experts
        for slot, first in enumerate(others):
            replicas[first + slot % spare % (experts // ranks)] = slot
        return cls(tuple(range(experts)), tuple(replicas), ranks, spare)

    @property
    def room(self) -> int:
        """Experts of a rank."""
        return len(self.seats) // self.ranks

    @property
    def of_rank(self) -> tuple[int, int, int]:
        """A rank's slots: for rows of the first half of the ranks, for those of the second, and spare ones."""
        return self.room, self.room, self.spare

    @property
    def number(self) -> int:
        """Slots of all ranks."""
        return self.ranks * sum(self.of_rank)

    def of_rows(self, rank: int) -> list[int]:
        """The slot to which a rank sends its rows for each expert."""
        half = self._half(rank)
        return [
            self._spare(copy) if self._has(copy) and self._half(seat // self.room) != half else self._seat(seat, half)
            for seat, copy in zip(self.seats, self.replicas, strict=True)
        ]

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank that has the weights of each spare slot."""
        return tuple(row // self.room for row in self._rows)

    def rows(self, rank: int) -> list[int]:
        """The rows of a rank's leaves that go to spare slots, in the order of the slots."""
        return [row % self.room for row in self._rows if row // self.room == rank]

    @cached_property
    def _rows(self) -> Sequence[int]:
        """The row of all ranks' leaves that each spare slot has a copy of."""
        rows = [slot // self.spare * self.room for slot in range(self.ranks * self.spare)]
        for seat, copy in zip(self.seats, self.replicas, strict=True):
            if self._has(copy):
                rows[copy] = seat
        return rows

    def _has(self, copy: int) -> bool:
        return 0 <= copy < self.ranks * self.spare

    def _half(self, rank: int) -> int:
        return 2 * rank // self.ranks

    def _seat(self, seat: int, half: int) -> int:
        rank, row = divmod(seat, self.room)
        return rank * sum(self.of_rank) + half * self.room + row

    def _spare(self, copy: int) -> int:
        rank, slot = divmod(copy, self.spare)
        return rank * sum(self.of_rank) + 2 * self.room + slot

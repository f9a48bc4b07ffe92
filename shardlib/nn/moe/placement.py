"""The placement of experts: which rank is to compute which, so that loads are equal, and where replicas of hot ones are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardlib.tree import leaves_of, tree_map

Shares = list[list[int]]  # each rank's experts
NONE = -1  # in place of the spare slot of an expert without a copy, and of the expert in a slot without one


def balanced_seats(counts: torch.Tensor, ranks: int, seats: torch.Tensor | None = None) -> torch.Tensor:
    """Seats of experts, so that the largest load of a rank is small. A pure function.

    Seats are dealt out to ranks in equal runs; a rank's load is the sum of the counts of its experts. Experts are placed by
    falling count, each on the least loaded rank with a free seat (LPT; Graham 1969, with as many experts on every rank), and
    then pairs change places while that lowers the larger one of their ranks' loads. Experts stay where they are if nothing is
    gained; else the ranks' new shares are matched with their present ones, so that few experts move.

    Args:
        counts: ``[E]``: assignments of each expert, or their shares, as logged.
        ranks: over which experts are dealt out.
        seats: ``[E]``, int64, the present ones; by default expert e has seat e.

    Returns:
        ``[E]``, int64, a permutation: the seat of each expert. Its largest load is no larger than that of ``seats``.

    Raises:
        ValueError: ranks that do not divide the experts, counts that are negative or not finite, or seats that are no
            permutation.

    >>> sl.nn.routers.balanced_seats(torch.tensor([5, 4, 1, 0]), ranks=2).tolist()  # loads 9 and 1 -> 5 and 5
    [0, 3, 2, 1]
    """
    return balanced_replicas(counts, ranks, 0, seats)[0]


def balanced_replicas(
    counts: torch.Tensor,
    ranks: int,
    spare: int,
    seats: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seats of experts, and spare slots for second copies of the hottest, as `balanced_seats` has seats alone.

    A copy takes half of its expert's load. Every number of copies is tried, of the experts with the largest counts: seats are
    chosen by the loads that these leave there, then spare slots for the other halves, and then experts change places, and
    copies, while that helps. Of equally good choices the one with the fewest copies is taken.

    Args:
        spare: slots of a rank, which are numbered through over ranks.
        replicas: ``[E]``, int64, the present ones: the spare slot of each expert's copy, −1 for none; by default no copies.

    Returns:
        ``[E]``, the seat of each expert, and ``[E]``, the spare slot of its copy. The largest load is no larger than that of
        the present ones.

    Raises:
        ValueError: as `balanced_seats`; or a negative ``spare``, two copies in one slot, or one in no slot of the ranks.

    >>> sl.nn.routers.balanced_replicas(torch.tensor([8, 1, 1, 0]), ranks=2, spare=1)  # loads 9 and 1 -> 5 and 5
    (tensor([0, 1, 2, 3]), tensor([ 1, -1, -1, -1]))
    """
    number = len(counts)
    numbers = list(range(number)) if seats is None else seats.tolist()
    if ranks < 1 or number % ranks or sorted(numbers) != list(range(number)):
        raise ValueError(
            f"balanced_seats: {number} counts, {ranks} ranks, seats {numbers}. Ranks must divide the experts, and seats "
            "permute them"
        )
    slots = [NONE] * number if replicas is None else replicas.tolist()
    copies = [slot for slot in slots if slot != NONE]
    if spare < 0 or len(slots) != number or not {*copies} <= {*range(ranks * spare)} or len({*copies}) < len(copies):
        raise ValueError(
            f"balanced_replicas: copies in {slots}, and {ranks} ranks with {spare} spare slots each. Give each copy a slot "
            "of its own, from 0 on, or −1"
        )
    loads = _in_whole_numbers(counts)
    present, held = _by_rank(numbers, ranks, number // ranks), _by_rank(slots, ranks, spare)
    hottest = sorted(range(number), key=lambda expert: -loads[expert])
    best, shares, others = _largest(present, held, loads), present, held
    for copied in range(min(number, ranks * spare) + 1 if ranks > 1 else 1):
        found = _chosen(loads, ranks, spare, hottest[:copied])
        if (largest := _largest(*found, loads)) < best:
            best, (shares, others) = largest, found
    order = _matched(shares, present)
    seated = _seated([shares[share] for share in order], numbers, number // ranks)
    return torch.tensor(seated), torch.tensor(_seated([others[share] for share in order], slots, spare))


def _in_whole_numbers(counts: torch.Tensor) -> list[int]:
    """Loads, so that sums and halves are exact and every change that helps makes a load smaller."""
    numerical = counts.double().tolist()
    if not all(0 <= load < float("inf") for load in numerical):
        raise ValueError(f"balanced_seats: counts {numerical}; they must be finite, and 0 or more")
    ratios = [load.as_integer_ratio() for load in numerical]
    unit = max((below for _, below in ratios), default=1)
    return [2 * above * (unit // below) for above, below in ratios]


def _by_rank(places: Sequence[int], ranks: int, room: int) -> Shares:
    """The experts whose places are each rank's, in the order of places."""
    there = sorted((place, expert) for expert, place in enumerate(places) if place != NONE)
    return [[expert for place, expert in there if place // room == rank] for rank in range(ranks)]


def _parts(loads: Sequence[int], copied: Iterable[int]) -> dict[int, int]:
    """The load of each expert in each of its places: half of it if it is ``copied``."""
    return {expert: load // (1 + (expert in copied)) for expert, load in enumerate(loads)} | {NONE: 0}


def _largest(shares: Shares, copies: Shares, loads: Sequence[int]) -> int:
    """The largest load of a rank."""
    parts = _parts(loads, {expert for some in copies for expert in some})
    return max(_sums([[*share, *some] for share, some in zip(shares, copies, strict=True)], parts), default=0)


def _chosen(loads: Sequence[int], ranks: int, spare: int, copied: Sequence[int]) -> tuple[Shares, Shares]:
    """Each rank's experts, and those of which it has a copy, if these experts are ``copied``."""
    parts = _parts(loads, copied)
    slots = [*copied, *[NONE] * (ranks * spare - len(copied))]
    shares = _distributed(range(len(loads)), parts, [0] * ranks)
    copies = _distributed(slots, parts, _sums(shares, parts))
    while True:
        before = _sums([*shares, *copies], parts)
        shares = _improved(shares, parts, _sums(copies, parts))
        copies = _improved(copies, parts, _sums(shares, parts))
        if _sums([*shares, *copies], parts) == before:
            return shares, [[expert for expert in some if expert != NONE] for some in copies]


def _sums(shares: Shares, loads: Mapping[int, int]) -> list[int]:
    return [sum(loads[expert] for expert in share) for share in shares]


def _distributed(experts: Iterable[int], loads: Mapping[int, int], beside: Sequence[int]) -> Shares:
    """Each rank's experts: the next largest load goes to the least loaded rank with a free place. ``beside``: what each rank
    has to do beside them."""
    left = sorted(experts, key=lambda expert: -loads[expert])
    shares: Shares = [[] for _ in beside]
    sums, room = list(beside), len(left) // len(beside)
    for expert in left:
        rank = min((rank for rank, share in enumerate(shares) if len(share) < room), key=sums.__getitem__)
        shares[rank].append(expert)
        sums[rank] += loads[expert]
    return shares


def _improved(shares: Shares, loads: Mapping[int, int], beside: Sequence[int]) -> Shares:
    """The shares after exchanges of two experts, each with the most loaded rank, until none lowers the larger load."""
    sums = [sum(pair) for pair in zip(_sums(shares, loads), beside, strict=True)]
    while True:
        top = max(range(len(shares)), key=sums.__getitem__)
        best = sums[top], 0, 0, 0
        for other, share in enumerate(shares):
            for here, mine in enumerate(shares[top]):
                for there, yours in enumerate(share):
                    less = loads[mine] - loads[yours]
                    best = min(best, (max(sums[top] - less, sums[other] + less), other, here, there))
        largest, other, here, there = best
        if largest >= sums[top]:
            return shares
        less = loads[shares[top][here]] - loads[shares[other][there]]
        sums[top], sums[other] = sums[top] - less, sums[other] + less
        shares[top][here], shares[other][there] = shares[other][there], shares[top][here]


def _matched(shares: Shares, present: Shares) -> list[int]:
    """The number of each rank's share: those that have most in common with a rank's present one are matched first."""
    common = [
        (-len({*share} & {*held}), rank, number)
        for number, share in enumerate(shares)
        for rank, held in enumerate(present)
    ]
    matched: dict[int, int] = {}
    for _, rank, number in sorted(common):
        if rank not in matched and number not in matched.values():
            matched[rank] = number
    return [matched[rank] for rank in range(len(present))]


def _seated(shares: Shares, seats: Sequence[int], room: int) -> list[int]:
    """The seat of each expert, or spare slot of each copy: where it stays on its rank, the one that it has."""
    found = [NONE] * len(seats)
    for rank, share in enumerate(shares):
        staying = [expert for expert in share if seats[expert] // room == rank]
        kept = {seats[expert] for expert in staying}
        free = (seat for seat in range(rank * room, (rank + 1) * room) if seat not in kept)
        for expert in sorted(share):
            found[expert] = seats[expert] if expert in staying else next(free)
    return found


@dataclass(frozen=True)
class ExpertPlacement:
    """The slots of a layer, rank by rank: where the rows of each rank for each expert are computed.

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

    >>> from shardlib.nn.moe.placement import ExpertPlacement
    >>> placed = ExpertPlacement(seats=(0, 1), replicas=(1, -1), ranks=2, spare=1)  # 3 slots a rank: two halves, a spare one
    >>> placed.of_rows(0), placed.of_rows(1)  # rank 1 sends its rows for expert 0 to its own spare slot
    ([0, 3], [5, 4])
    >>> placed.owners, placed.rows(0)
    ((0, 0), [0, 0])
    """

    seats: tuple[int, ...]
    replicas: tuple[int, ...]
    ranks: int
    spare: int

    def __post_init__(self) -> None:
        copies = [slot for slot in self.replicas if slot >= 0]
        if sorted(self.seats) != list(range(len(self.seats))) or len(set(copies)) < len(copies):
            raise ValueError(f"{self}: seats must be a permutation, and a slot has one expert")

    @classmethod
    def assumed(cls, experts: int, ranks: int, spare: int) -> ExpertPlacement:
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
        each, half, found = sum(self.of_rank), self._half(rank), []
        for seat, copy in zip(self.seats, self.replicas, strict=True):
            owner, row = divmod(seat, self.room)
            if self._has(copy) and self._half(owner) != half:
                at, slot = divmod(copy, self.spare)
                found.append(at * each + 2 * self.room + slot)
            else:
                found.append(owner * each + half * self.room + row)
        return found

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


class ShardedExperts:
    """A leaf of which this rank has some experts and other ranks the others (`shardlib.experts`).

    Only a layer of experts uses it, among whose tokens are those of other ranks; every other use is refused.

    Attributes:
        path: the leaf's path.
        local: gives the leaf, to a layer of experts.
        rows_for_replicas: gives rows of the leaf, by their numbers, to be sent: ``[rows, elements of an expert]``.
        replicas: makes of other ranks' rows a leaf like the one that ``local`` gives.
    """

    path: str
    local: Callable[[], torch.Tensor]
    rows_for_replicas: Callable[[Sequence[int]], torch.Tensor]
    replicas: Callable[[torch.Tensor], torch.Tensor]


def local_experts(params: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool | None]:
    """The parameters for a layer of experts, and whether all of them are sharded; None if only some are."""
    sharded = {isinstance(leaf, ShardedExperts) for leaf in leaves_of(params)}
    found = tree_map(lambda leaf: leaf.local() if isinstance(leaf, ShardedExperts) else leaf, params)
    return found, None if len(sharded) > 1 else True in sharded

"""`balanced_seats` and `balanced_replicas`: which rank is to compute which experts, so that ranks have equal loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
            f"balanced_seats: {number} counts, {ranks} ranks and seats {numbers}: ranks must divide the experts, and seats "
            "be a permutation of their numbers"
        )
    slots = [NONE] * number if replicas is None else replicas.tolist()
    copies = [slot for slot in slots if slot != NONE]
    if spare < 0 or len(slots) != number or not {*copies} <= {*range(ranks * spare)} or len({*copies}) < len(copies):
        raise ValueError(
            f"balanced_replicas: the copies of {number} experts are in {slots}, and {ranks} ranks have {spare} spare slots "
            "each: give each copy a slot of its own, numbered from 0, and −1 to experts without one"
        )
    loads = _in_whole_numbers(counts)
    present, held = _by_rank(numbers, ranks, number // ranks), _by_rank(slots, ranks, spare)
    hottest = sorted(range(number), key=lambda expert: -loads[expert])
    best = max(_with_copies(present, held, loads), default=0)
    shares, others = present, held
    for copied in range(min(number, ranks * spare) + 1 if ranks > 1 else 1):
        found = _chosen(loads, ranks, spare, hottest[:copied])
        if (largest := max(_with_copies(*found, loads), default=0)) < best:
            best, (shares, others) = largest, found
    order = _matched(shares, present)
    seated = _seated([shares[share] for share in order], numbers, number // ranks)
    return torch.tensor(seated), torch.tensor(_seated([others[share] for share in order], slots, spare))


def _in_whole_numbers(counts: torch.Tensor) -> list[int]:
    """Loads, so that sums and halves are exact and every change that helps makes a load smaller."""
    numerical = counts.double().tolist()
    if not all(0 <= load < float("inf") for load in numerical):
        raise ValueError(f"balanced_seats: counts {numerical}: they must be finite, and 0 or more")
    ratios = [load.as_integer_ratio() for load in numerical]
    unit = max((below for _, below in ratios), default=1)
    return [2 * above * (unit // below) for above, below in ratios]


def _by_rank(places: Sequence[int], ranks: int, room: int) -> Shares:
    """The experts whose places are each rank's, in the order of places."""
    there = sorted((place, expert) for expert, place in enumerate(places) if place != NONE)
    return [[expert for place, expert in there if place // room == rank] for rank in range(ranks)]


def _with_copies(shares: Shares, copies: Shares, loads: Sequence[int]) -> list[int]:
    """The load of each rank. An expert with a copy makes half of its load in each place."""
    copied = {expert for some in copies for expert in some}
    parts = [load // (1 + (expert in copied)) for expert, load in enumerate(loads)]
    return [sum(parts[expert] for expert in (*share, *some)) for share, some in zip(shares, copies, strict=True)]


def _chosen(loads: Sequence[int], ranks: int, spare: int, copied: Sequence[int]) -> tuple[Shares, Shares]:
    """Each rank's experts, and those of which it has a copy, if these experts are ``copied``."""
    parts = {expert: load // (1 + (expert in copied)) for expert, load in enumerate(loads)} | {NONE: 0}
    slots = [*copied, *[NONE] * (ranks * spare - len(copied))]
    shares = _dealt(range(len(loads)), parts, [0] * ranks)
    copies = _dealt(slots, parts, _sums(shares, parts))
    while True:
        before = _sums([*shares, *copies], parts)
        shares = _improved(shares, parts, _sums(copies, parts))
        copies = _improved(copies, parts, _sums(shares, parts))
        if _sums([*shares, *copies], parts) == before:
            return shares, [[expert for expert in some if expert != NONE] for some in copies]


def _sums(shares: Shares, loads: Mapping[int, int]) -> list[int]:
    return [sum(loads[expert] for expert in share) for share in shares]


def _dealt(experts: Iterable[int], loads: Mapping[int, int], beside: Sequence[int]) -> Shares:
    """Each rank's experts: the next largest load goes to the least loaded rank with a free place.

    Args:
        beside: what each rank has to do beside them.
    """
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


# `Dealt`: a leaf of experts that are dealt out over the mesh, as a loss function gets it.


class Dealt:
    """A leaf of which this rank has some experts and other ranks the others (`shardlib.experts`).

    Only a layer of experts uses it, among whose tokens are those of other ranks; every other use is refused.

    Attributes:
        path: the leaf's path.
        opened: gives the leaf, to a layer of experts.
        lent: gives rows of the leaf, by their numbers, to be sent to other ranks: ``[rows, elements of an expert]``.
        borrowed: makes of other ranks' rows, as these lent them, a leaf like the one that ``opened`` gives.
    """

    path: str
    opened: Callable[[], torch.Tensor]
    lent: Callable[[Sequence[int]], torch.Tensor]
    borrowed: Callable[[torch.Tensor], torch.Tensor]


def opened(params: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool | None]:
    """The parameters for a layer of experts, and whether all of them are dealt out; None if only some are."""
    dealt = {isinstance(leaf, Dealt) for leaf in leaves_of(params)}
    found = tree_map(lambda leaf: leaf.opened() if isinstance(leaf, Dealt) else leaf, params)
    return found, None if len(dealt) > 1 else True in dealt

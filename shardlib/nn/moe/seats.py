"""`balanced_seats`: which rank is to hold which experts, so that ranks have equal loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    number = len(counts)
    numbers = list(range(number)) if seats is None else seats.tolist()
    if ranks < 1 or number % ranks or sorted(numbers) != list(range(number)):
        raise ValueError(
            f"balanced_seats: {number} counts, {ranks} ranks and seats {numbers}: ranks must divide the experts, and seats "
            "be a permutation of their numbers"
        )
    numerical = counts.double().tolist()
    if not all(0 <= load < float("inf") for load in numerical):
        raise ValueError(f"balanced_seats: counts {numerical}: they must be finite, and 0 or more")
    # In whole numbers, so that sums are exact and every exchange of two experts makes a load smaller.
    ratios = [load.as_integer_ratio() for load in numerical]
    unit = max((below for _, below in ratios), default=1)
    loads = [above * (unit // below) for above, below in ratios]
    room = number // ranks
    present = [sorted(range(number), key=numbers.__getitem__)[rank * room :][:room] for rank in range(ranks)]
    shares = _improved(_dealt(loads, ranks), loads)
    if _largest(shares, loads) >= _largest(present, loads):
        return torch.tensor(numbers)
    return torch.tensor(_seated(_matched(shares, present), numbers, room))


def _largest(shares: Sequence[Sequence[int]], loads: Sequence[int]) -> int:
    return max((sum(loads[expert] for expert in share) for share in shares), default=0)


def _dealt(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's experts: the next largest load goes to the least loaded rank with a free seat."""
    room = len(loads) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < room), key=sums.__getitem__)
        shares[rank].append(expert)
        sums[rank] += loads[expert]
    return shares


def _improved(shares: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
    """The shares after exchanges of two experts, each with the most loaded rank, until none lowers the larger load."""
    sums = [sum(loads[expert] for expert in share) for share in shares]
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
        shares[top][here], shares[other][there] = shares[other][there], shares[top][here]
        for rank in (top, other):
            sums[rank] = sum(loads[expert] for expert in shares[rank])


def _matched(shares: Sequence[Sequence[int]], present: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The shares in the order of ranks: those that have most in common with a rank's present one first."""
    common = [
        (-len({*share} & {*held}), rank, number)
        for number, share in enumerate(shares)
        for rank, held in enumerate(present)
    ]
    matched: dict[int, int] = {}
    for _, rank, number in sorted(common):
        if rank not in matched and number not in matched.values():
            matched[rank] = number
    return [shares[matched[rank]] for rank in range(len(present))]


def _seated(shares: Sequence[Sequence[int]], seats: Sequence[int], room: int) -> list[int]:
    """The seat of each expert: on its own rank the one that it has."""
    found = [-1] * len(seats)
    for rank, share in enumerate(shares):
        staying = [expert for expert in share if seats[expert] // room == rank]
        kept = {seats[expert] for expert in staying}
        free = (seat for seat in range(rank * room, (rank + 1) * room) if seat not in kept)
        for expert in sorted(share):
            found[expert] = seats[expert] if expert in staying else next(free)
    return found

"""Rows that ranks fetch from one another, by a list that all of them know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardlib.collectives.tokens.routing import Hop, PendingTransfer, Route, RowPermutation, RowTransfer
from shardlib.common._compat import no_modes
from shardlib.mesh.mesh import Mesh

Place = tuple[int, ...]  # a rank's coordinates along the axes of a fetch


class FetchHop:
    """One hop of all rows, as every rank knows it.

    Attributes:
        leaving: place -> the slots whose rows leave it, to each rank of the axis in turn.
        arriving: place -> the slots whose rows come to it, from each rank of the axis in turn.
    """

    def __init__(self, held: Mapping[Place, Sequence[int]], targets: Sequence[Place], k: int, size: int) -> None:
        others = range(size)
        self.leaving: dict[Place, list[list[int]]] = {
            place: [[slot for slot in slots if targets[slot][k] == other] for other in others]
            for place, slots in held.items()
        }
        self.arriving: dict[Place, list[list[int]]] = {
            place: [self.leaving[*place[:k], other, *place[k + 1 :]][place[k]] for other in others] for place in held
        }


@dataclass(frozen=True)
class TokenFetch:
    """A fetch of one row for each slot of every rank, from the rank that has it. Autograd takes gradients back.

    An all-to-all along each axis in turn, as for tokens; sizes are known beforehand, and nothing is encoded.

    Attributes:
        axes: on whose ranks the slots lie in equal runs, the first axis major.
        owners: for each slot, the number of the rank that has its row.

    >>> from shardlib.collectives.tokens.fetch import TokenFetch
    >>> def fetched(mesh):  # rank 0 fetches from rank 1, and rank 1 its own
    ...     rows = torch.tensor([[10.0], [11.0]]) if mesh.rank else torch.zeros(0, 1)
    ...     return TokenFetch(("expert",), (1, 1)).start(mesh, rows).wait().tolist()
    >>> sl.simulate(fetched, mesh=dict(expert=2))
    [[[10.0]], [[11.0]]]
    """

    axes: tuple[str, ...]
    owners: tuple[int, ...]

    def start(self, mesh: Mesh, rows: torch.Tensor) -> PendingTransfer:
        """Start to send ``rows`` ``[R, W]``: those that this rank has, by falling due in the order of slots.

        What comes is ``[slots of a rank, W]``.
        """
        place = tuple(mesh.coords[axis] for axis in self.axes)
        hops = []
        for axis, hop in zip(self.axes, self._hops(mesh.shape), strict=True):
            sizes = [[*map(len, slots[place])] for slots in (hop.leaving, hop.arriving)]
            arrived = list(itertools.chain(*hop.arriving[place]))
            with no_modes():  # a plan's trace reads them
                both = torch.tensor(sizes[0]), torch.tensor(sizes[1])
            hops.append(Hop(axis, both, sum(sizes[0]), len(arrived), _sorted(arrived, rows.device)))
        ends = torch.arange(1, len(arrived) + 1, device=rows.device)
        route = Route(len(rows), tuple(hops), None, ends)
        return PendingTransfer(rows, RowTransfer(mesh, route, True, (None, None), "replicas of experts"))

    def payload(self, sizes: Mapping[str, int], coords: Mapping[str, int], row: int) -> tuple[dict[str, int], ...]:
        """Axis -> bytes that the rank at ``coords`` sends of rows of ``row`` bytes, and in backward of their gradients."""
        place = tuple(coords[axis] for axis in self.axes)
        found = []
        for way in ("leaving", "arriving"):
            runs = [getattr(hop, way)[place] for hop in self._hops(sizes)]
            others = [sum(map(len, run)) - len(run[at]) for run, at in zip(runs, place, strict=True)]
            found.append({axis: number * row for axis, number in zip(self.axes, others, strict=True)})
        return tuple(found)

    def _hops(self, sizes: Mapping[str, int]) -> list[FetchHop]:
        """The hop along each axis."""
        return _hops(tuple(sizes[axis] for axis in self.axes), self.owners)


@lru_cache(maxsize=256)  # of the layers of a model, step by step
def _hops(ways: tuple[int, ...], owners: tuple[int, ...]) -> list[FetchHop]:
    places = list(itertools.product(*map(range, ways)))
    each = len(owners) // math.prod(ways)
    targets = [places[slot // each] for slot in range(len(owners))]
    held: dict[Place, list[int]] = {place: [] for place in places}
    for slot, owner in enumerate(owners):
        held[places[owner]].append(slot)
    hops = []
    for k, size in enumerate(ways):
        hops.append(FetchHop(held, targets, k, size))
        held = {place: sorted(itertools.chain(*runs)) for place, runs in hops[-1].arriving.items()}
    return hops


def _sorted(slots: Sequence[int], device: torch.device) -> RowPermutation | None:
    """The order in which rows that have arrived lie by their slots."""
    there = sorted(range(len(slots)), key=slots.__getitem__)
    if there == list(range(len(slots))):
        return None
    back = sorted(range(len(slots)), key=there.__getitem__)
    return RowPermutation(torch.tensor(there, device=device), torch.tensor(back, device=device))

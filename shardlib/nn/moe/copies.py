"""The copies of experts with which a rank computes: its own, and those of other ranks' hot experts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.collectives.tokens.base import Coming
from shardlib.collectives.tokens.fetch import TokenFetch
from shardlib.common._compat import outside_of_graphs
from shardlib.common.environment import environment
from shardlib.mesh.mesh import Mesh
from shardlib.nn.moe.compute import ExpertStore, Groups
from shardlib.nn.moe.config import Expert
from shardlib.nn.moe.slots import Slots
from shardlib.tree import tree_map


class Own(NamedTuple):
    """This rank's experts alone, each of which computes all of its rows in one product.

    Attributes:
        store: brings them to the device; None if they are there.
    """

    params: Mapping[str, Any]
    store: ExpertStore | None

    @classmethod
    def of(cls, params: Mapping[str, Any], x: torch.Tensor) -> Own:
        """Of a layer with inputs ``[T, W]``, whose tokens are to travel."""
        store = ExpertStore.of(params)
        if store is not None:
            store.expect(x)
        return cls(params, store)

    def outputs(self, expert: Expert, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The results of ``rows`` ``[R, W]``, which are sorted by expert and have these ``ends``."""
        if self.store is not None:
            return self.store.outputs(expert, self.params, rows, ends)
        return expert(self.params, rows, Groups(ends, rows.shape[0]).product)


class Copies:
    """This rank's experts for rows of each half of the ranks, and second copies of experts, whose weights are under way.

    Attributes:
        slots: ``[E]``, int64: where this rank sends its rows for each expert (`shardlib.nn.moe.slots.Slots`).
        number: of slots of all ranks.
    """

    def __init__(self, params: Mapping[str, Any], slots: Slots, axes: Sequence[str], mesh: Mesh) -> None:
        self._params, self._mesh, self._of_rank, self.number = params, mesh, slots.of_rank, slots.number
        rank = 0
        for axis in axes:
            rank = rank * mesh.shape[axis] + mesh.coords[axis]
        self.slots = torch.tensor(slots.of_rows(rank), device=mesh.device)
        fetch, rows = TokenFetch(tuple(axes), slots.owners), slots.rows(rank)
        self._coming: Mapping[str, Coming] = tree_map(lambda leaf: fetch.start(mesh, leaf.lent(rows)), params)

    @outside_of_graphs
    def _landed(self) -> list[Mapping[str, Any]]:
        """For the slots of each kind, the leaves."""
        own = tree_map(lambda leaf: leaf.opened(), self._params)
        borrowed = tree_map(lambda leaf, coming: leaf.borrowed(coming.wait()), self._params, self._coming)
        return [own, own, borrowed]

    @outside_of_graphs
    def _lengths(self, rows: int, ends: torch.Tensor) -> list[int]:
        """The number of rows for the slots of each kind, which the host reads; the last have those that are left over."""
        lasts = list(itertools.accumulate(self._of_rank))[:-1]
        if self._mesh.abstract:  # a plan's trace knows no numbers, and takes slots to have equally many rows
            stops = [rows * last // sum(self._of_rank) for last in lasts]
        else:
            stops = ends[[last - 1 for last in lasts]].tolist()
        return [stop - start for start, stop in itertools.pairwise([0, *stops, rows])]

    def outputs(self, expert: Expert, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As `Own.outputs`, with rows that are sorted by slot."""
        lengths, results, start = self._lengths(len(rows), ends), [], 0
        for params, part, some in zip(
            self._landed(), rows.split(lengths), ends.split(list(self._of_rank)), strict=True
        ):
            results.append(expert(params, part, Groups(some - start, len(part)).product))
            start += len(part)
        return torch.cat(results)


@outside_of_graphs
def borrow(params: Mapping[str, Any], seats: torch.Tensor | None, replicas: torch.Tensor, exchange: Any) -> Copies:
    """Start to fetch the second copies that ``replicas`` ``[E]`` says; ``seats`` as in `shardlib.nn.run_experts`.

    The host reads both. Weights travel as they are, whatever encodes tokens.
    """
    mesh, number = environment().mesh, len(replicas)
    assert mesh is not None
    ranks = 1
    for axis in exchange.axes:
        ranks *= mesh.shape[axis]
    if mesh.abstract:
        slots = Slots.assumed(number, ranks, exchange.spare)
    else:
        where = range(number) if seats is None else seats.tolist()
        slots = Slots(tuple(where), tuple(replicas.tolist()), ranks, exchange.spare)
    return Copies(params, slots, exchange.axes, mesh)

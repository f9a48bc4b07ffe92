"""The base of token exchanges that are made of one all-to-all along each of their axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardlib.collectives.tokens.base import TokenExchange
from shardlib.collectives.tokens.journey import Journey, Travelling
from shardlib.collectives.tokens.route import Route, even, uneven
from shardlib.errors import SpecError
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class Hops(TokenExchange):
    """A token exchange of one all-to-all along each axis in turn; on the way back they run in reverse."""

    def __str__(self) -> str:
        return f"{self.name} over {' and '.join(f'axis {axis!r}' for axis in self.axes)}"

    def send(
        self,
        mesh: Mesh,
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        slots: int | None = None,
        anchor: torch.Tensor | None = None,
    ) -> tuple[Travelling, Route]:
        self._check(mesh, rows, counts)
        if anchor is None and torch.is_grad_enabled():
            anchor = rows.new_zeros((), requires_grad=True)
        if slots is None and not mesh.abstract:
            route = uneven(mesh, self.axes, len(rows), counts, anchor)
        else:  # a plan's trace knows no counts, and takes them to be equal
            slots = -(-len(rows) // len(counts)) if slots is None else slots
            route = even(mesh, self.axes, len(rows), counts, slots, anchor)
        return Travelling(rows, Journey(mesh, route, outward=True)), route

    def back(self, mesh: Mesh, rows: torch.Tensor, way: Route) -> Travelling:
        if rows.dim() != 2 or len(rows) != way.arriving:
            raise SpecError(
                f"{self}: results are {tuple(rows.shape)} and {way.arriving} rows arrived; pass one result for each"
            )
        return Travelling(rows, Journey(mesh, way, outward=False))

    def _check(self, mesh: Mesh, rows: torch.Tensor, counts: torch.Tensor) -> None:
        if rows.dim() != 2 or counts.dim() != 1 or counts.dtype is not torch.int64:
            raise SpecError(
                f"{self}: rows are {tuple(rows.shape)} and counts {tuple(counts.shape)} of {counts.dtype}; pass rows "
                "[R, W], and counts [experts] of int64"
            )
        ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        if len(counts) % ranks:
            raise SpecError(
                f"{self}: {len(counts)} experts do not divide over {ranks} ranks; use a number of experts that is a multiple "
                "of the ranks"
            )

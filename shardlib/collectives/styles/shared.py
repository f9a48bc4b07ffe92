"""Leaves that are whole on every rank and used on slices of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.styles.base import Compute, Style
from shardlib.collectives.styles.slices import Slice
from shardlib.mesh.specs import P


@dataclass(frozen=True)
class Shared(Style):
    """A style in which each rank holds the whole leaf and uses it on its slices of activations, so that the leaf's gradient
    is a partial sum over the axis."""

    name: ClassVar[str] = "shared"
    sums: ClassVar[bool] = True

    @property
    def rule(self) -> str:
        return repr(self.name)

    def spec(self, shape: tuple[int, ...], ways: int) -> P:
        return P()

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        return compute(x, weight.local, bias)

    def grouped(self, weight: Slice, rows: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        return compute(rows, weight.local, bias)

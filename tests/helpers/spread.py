"""Values in float64, each with how far independent roundings spread it: how near a computation in another dtype must be.

Relative errors of size 1 of all that has been computed, independent of each other, are carried through every operation to
the first order. So a difference of large numbers, which a rounding of either moves far, may be off by more than a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Rounded:
    """A value and, of its shape, what errors of size 1 amount to: times a dtype's rounding, the error to be expected."""

    value: torch.Tensor
    spread: torch.Tensor

    def __add__(self, other: Rounded) -> Rounded:
        return _computed(self.value + other.value, self.spread, other.spread)

    def __mul__(self, other: Rounded) -> Rounded:
        return _computed(self.value * other.value, self.value * other.spread, self.spread * other.value)

    def __getitem__(self, index: Any) -> Rounded:
        return Rounded(self.value[index], self.spread[index])

    def __iter__(self) -> Iterator[Rounded]:
        return (self[row] for row in range(len(self.value)))

    @property
    def mT(self) -> Rounded:
        return Rounded(self.value.mT, self.spread.mT)

    def view(self, *shape: int) -> Rounded:
        return Rounded(self.value.view(*shape), self.spread.view(*shape))


def exact(value: torch.Tensor) -> Rounded:
    """What is given, in whatever dtype."""
    return Rounded(value.double(), torch.zeros(value.shape, dtype=torch.float64))


def stacked(values: Sequence[Rounded]) -> Rounded:
    return Rounded(torch.stack([each.value for each in values]), torch.stack([each.spread for each in values]))


def joined(values: Sequence[Rounded]) -> Rounded:
    return Rounded(torch.cat([each.value for each in values]), torch.cat([each.spread for each in values]))


def product(matrix: Rounded, vector: Rounded) -> Rounded:
    """A matrix ``[n, m]`` times a vector ``[m]``."""
    by_vector = (matrix.value.square() @ vector.spread.square()).sqrt()
    by_matrix = (matrix.spread.square() @ vector.value.square()).sqrt()
    return _computed(matrix.value @ vector.value, by_vector, by_matrix)


def linear(x: Rounded, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
    found = product(exact(weight), x)
    return found if bias is None else found + exact(bias)


def normed(x: Rounded, weight: torch.Tensor, eps: float) -> Rounded:
    """RMSNorm of a vector."""
    square = x.value.square().mean() + eps
    of_norm = x.value * ((x.value * x.spread).square().sum().sqrt() / (square * len(x.value)))
    scale = weight.double() / square.sqrt()
    return _computed(x.value * scale, x.spread * scale, of_norm * scale)


def silu(x: Rounded) -> Rounded:
    share = x.value.sigmoid()
    return _computed(F.silu(x.value), x.spread * share * (1 + x.value * (1 - share)))


def softmax(x: Rounded) -> Rounded:
    """Of a vector. What moves all logits alike moves nothing."""
    odds = x.value.softmax(0)
    moved = odds * x.spread
    by_others = odds * (moved.square().sum() - moved.square()).clamp(min=0).sqrt()
    return _computed(odds, moved * (1 - odds), by_others)


def _computed(value: torch.Tensor, *spreads: torch.Tensor) -> Rounded:
    return Rounded(value, sum((spread.square() for spread in spreads), value.square()).sqrt())


def assert_near(found: torch.Tensor, wanted: Rounded, rounding: float) -> None:
    """
    Args:
        rounding: how many times ``wanted.spread`` ``found`` may be off.
    """
    off = (found.double() - wanted.value).abs()
    assert bool((off <= rounding * wanted.spread).all()), (
        f"off by {float((off / wanted.spread).nan_to_num(posinf=torch.inf).max()):.3g} roundings, {rounding:.3g} allowed"
    )

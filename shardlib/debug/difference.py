"""The size of a difference between two tensors, and the size up to which it is rounding."""

from __future__ import annotations

from typing import NamedTuple

import torch

_FACTOR, _POWER = 8.0, 0.75
FLOOR = 1e-5  # added to the largest value: what is smaller by as much counts as 0


class Difference(NamedTuple):
    """The largest difference between elements of two tensors.

    Attributes:
        error: of a value and the one that it is to be; infinite if only one of them is finite, or the shapes differ.
        limit: up to which a difference is rounding.
        largest: of the values that are to be, without sign.
    """

    error: float
    limit: float
    largest: float

    @property
    def matters(self) -> bool:
        return self.error > self.limit


def tolerance(dtype: torch.dtype) -> float:
    """The share of the largest value up to which a difference is rounding: 8·ε^¾, for sums of a few thousand products.

    >>> from shardlib.debug.difference import tolerance
    >>> [f"{tolerance(dtype):.0e}" for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    ['1e-11', '5e-05', '2e-01']
    """
    return _FACTOR * torch.finfo(dtype).eps ** _POWER if dtype.is_floating_point else 0.0


def difference(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None = None) -> Difference:
    """The difference of ``found`` from ``wanted``, of one shape.

    Args:
        dtype: in which they were computed; by default the narrower one of theirs.
    """
    if found.shape != wanted.shape:
        return Difference(float("inf"), 0.0, float("inf"))
    if dtype is None:
        dtype = max(found.dtype, wanted.dtype, key=tolerance)
    if not found.numel():
        return Difference(0.0, 0.0, 0.0)
    a, b = (value.detach().double() for value in (found, wanted))
    largest = b.abs().nan_to_num(posinf=0.0).max().item()
    limit = tolerance(dtype) * (largest + FLOOR)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    return Difference(apart.max().item(), limit, largest)

"""The argument of the implementations of dropout that says which elements are dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Draw(NamedTuple):
    """A draw of the elements that are dropped.

    Attributes:
        p: the probability of an element to be dropped, in [0, 1).
        seed: of the random bits, modulo 2^64.
        start: the index of the first element; indices are consecutive.
        starts: the indices of the rows' first elements, int64, one per row, in place of ``start``.
    """

    p: float
    seed: int
    start: int = 0
    starts: torch.Tensor | None = None

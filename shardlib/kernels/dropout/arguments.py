"""What the implementations of dropout are given beside tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Draw(NamedTuple):
    """The elements that are dropped.

    Attributes:
        p: the probability, in [0, 1).
        seed: modulo 2^64.
        start: the index of the first element; the others follow it.
        starts: or the index of each row's first element, int64, one per row.
    """

    p: float
    seed: int
    start: int = 0
    starts: torch.Tensor | None = None

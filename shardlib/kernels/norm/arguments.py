"""What the implementations of norms are given beside rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """A norm of rows of d elements.

    Attributes:
        weight, bias: ``[d]``.
        centred: whether it is LayerNorm, which takes the mean off first.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool

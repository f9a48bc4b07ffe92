"""The parameters of a norm that its implementations take beside rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """A norm of rows of d elements.

    Attributes:
        weight, bias: ``[d]``.
        centred: whether the mean is subtracted first, as in LayerNorm.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool

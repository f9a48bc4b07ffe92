"""`Linear`: a layer's weight and bias, which multiply few rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.op import thin_matmul


class Linear(NamedTuple):
    """A weight ``[outputs, inputs]`` and a bias ``[outputs]``; called, it is `thin_matmul` with them.

    A weight that computes for itself, such as a slice, does so.
    """

    weight: torch.Tensor | Matrix
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if has_torch_function(self):
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        return thin_matmul(x, self.weight, self.bias)

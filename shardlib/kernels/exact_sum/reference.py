"""The digits of Σ x² in plain torch: the oracle of the kernels, and the fallback."""

from __future__ import annotations

import torch

from shardlib.kernels.exact_sum import digits

_CHUNK = 1 << 16  # elements, so that intermediate results stay small


def load(device: torch.device) -> str:
    return "reference"


def digits_of_squares(x: torch.Tensor) -> torch.Tensor:
    chunks = x.reshape(-1).split(_CHUNK)
    return torch.stack([digits.total(chunk.double().square()) for chunk in chunks]).sum(dim=0)

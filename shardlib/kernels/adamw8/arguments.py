"""Arguments of the implementations of AdamW with moments in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.kernels.adamw.arguments import Factors


class CodedStep(NamedTuple):
    """One AdamW step on flat tensors of one shape, and on the codes and scales of their moments."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    mu_scales: torch.Tensor
    nu: torch.Tensor
    nu_scales: torch.Tensor
    copy: torch.Tensor | None
    factors: Factors
    scale: torch.Tensor | None

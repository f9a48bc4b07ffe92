"""`linear`: products with a layer's weights, for a step of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.kernels.thin_matmul import thin_matmul


def linear(params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """``F.linear`` of a layer's weight and bias, ``[T, outputs]``, without gradients; of few rows by `thin_matmul`.

    A weight that computes for itself, such as a slice, does so.
    """
    weight, bias = params["weight"], params.get("bias")
    if has_torch_function((weight, bias)):
        return F.linear(x, weight, bias)
    return thin_matmul(x, weight, bias)

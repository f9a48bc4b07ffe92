"""Σ x² of a tensor in fp64, for global norms: finite if and only if every element is.

The square of an fp32 number is exact in fp64 and far from overflow, so the sum is finite as long as every element is: one
pass is both norm and finite check. Elements are added in a fixed order, within a span or tile and then over these: the same
bits in every run, for every instruction set and number of threads. Implementations differ by rounding in fp64.

Unscaling needs no pass of its own: the norm of s·x is s times the norm of x.

Bytes moved per element: 4 in fp32, 2 in bf16 or fp16; torch's chain for 16-bit gradients (cast, norm, isfinite, all) takes
12. 3 operations.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import FLOATS, serving
from shardlib.kernels.global_norm import reference

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def sum_of_squares(x: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """Σ x², a 0-d float64 tensor.

    Args:
        x: of any shape and floating dtype. Kernels take contiguous fp32, bf16 and fp16; plain torch takes the rest.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
    """
    check_tensors("sum_of_squares", {"x": x})
    with on(x.device):
        return serving("global_norm", reference, {"x": x}, "x", FLOATS, using).sum_of_squares(x)

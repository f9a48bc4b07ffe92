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

from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on
from shardlib.kernels.common.flat import FLOATS, serving

__all__ = ["sum_of_squares"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def sum_of_squares(x: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """Σ x², a 0-d float64 tensor.

    Args:
        x: of any shape and floating dtype. Kernels take contiguous fp32, bf16 and fp16; plain torch takes the rest.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
    """
    check_tensors("sum_of_squares", {"x": x})
    with on(x.device):
        return serving("global_norm", {"x": x}, "x", FLOATS, using).sum_of_squares(x)


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback."""

    @staticmethod
    def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()


class cpu(native.Compiled, sum_of_squares="pilppi"):
    """By global_norm.cpp."""

    EACH = 1 << 16  # elements of a partial sum, as in global_norm.cpp

    @classmethod
    def sum_of_squares(cls, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((), dtype=torch.float64)
        partial = x.new_empty(-(-x.numel() // cls.EACH), dtype=torch.float64)
        where = (partial, out, cls.runs_on(x.device))
        cls.library().sum_of_squares(x, native.DTYPES[x.dtype], x.numel(), *where)
        return out


class cuda(cpu):
    """By global_norm.cu."""

    EACH = 8192  # as in global_norm.cu

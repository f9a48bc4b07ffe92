"""Σ x² of a tensor as digits, which can be added to those of other tensors without rounding: see `digits`.

The square of a 24-bit mantissa has 48 bits, so integers of 64 bits hold the sum of 2¹⁶ squares of one exponent. Such sums are
added to the digits at the places of their exponents.

Bytes moved per element: 4 in fp32, 2 in bf16 or fp16. 6 operations on integers.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on
from shardlib.kernels.common.flat import FLOATS, serving
from shardlib.kernels.exact_sum import digits

__all__ = ["digits_of_squares"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",)}
_CHUNK = 1 << 16  # elements that plain torch sums at a time, so that intermediate results stay small
_SPAN = 1 << 18  # elements, as in exact_sum.cpp


def digits_of_squares(x: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """The digits of Σ x², float64 ``[digits.COUNT]``. A square of a float64 number is rounded to float64.

    Args:
        x: of any shape and floating dtype. Kernels take contiguous fp32, bf16 and fp16; plain torch takes the rest.
        using: names one implementation ("cpu", "reference"), for tests.
    """
    check_tensors("digits_of_squares", {"x": x})
    with on(x.device):
        return serving("exact_sum", {"x": x}, "x", FLOATS, using).digits_of_squares(x)


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback."""

    @staticmethod
    def digits_of_squares(x: torch.Tensor) -> torch.Tensor:
        chunks = x.reshape(-1).split(_CHUNK)
        return torch.stack([digits.total(chunk.double().square()) for chunk in chunks]).sum(dim=0)


class cpu(native.Compiled, digits_of_squares="pilppi"):
    """By exact_sum.cpp."""

    @staticmethod
    def digits_of_squares(x: torch.Tensor) -> torch.Tensor:
        spans = -(-x.numel() // _SPAN)
        integers = torch.zeros((spans, digits.PLACES), dtype=torch.int64)
        strange = torch.zeros(spans, dtype=torch.float64)
        cpu.library().digits_of_squares(x, native.DTYPES[x.dtype], x.numel(), integers, strange, threads())
        return digits.of_integers(integers.sum(dim=0), strange.sum())

"""Σ x² of a tensor as digits, which can be added to those of other tensors without rounding: see `digits`.

The square of a 24-bit mantissa has 48 bits, so integers of 64 bits hold the sum of 2¹⁶ squares of one exponent. Such sums are
added to the digits at the places of their exponents.

Bytes moved per element: 4 in fp32, 2 in bf16 or fp16. 6 operations on integers.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import FLOATS, serving
from shardlib.kernels.exact_sum import reference

IMPLEMENTATIONS = {"cpu": ("cpu",)}


def digits_of_squares(x: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """The digits of Σ x², float64 ``[digits.COUNT]``. A square of a float64 number is rounded to float64.

    Args:
        x: of any shape and floating dtype. Kernels take contiguous fp32, bf16 and fp16; plain torch takes the rest.
        using: names one implementation ("cpu", "reference"), for tests.
    """
    check_tensors("digits_of_squares", {"x": x})
    with on(x.device):
        return serving("exact_sum", reference, {"x": x}, "x", FLOATS, using).digits_of_squares(x)

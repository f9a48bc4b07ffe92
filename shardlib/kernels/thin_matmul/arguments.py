"""A quantised matrix, as the implementations of products take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.quantize import Blockwise


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight ``[outputs, inputs]``, quantised in blocks that do not cross rows.

    Attributes:
        values: ``[form.bytes(outputs · inputs)]``, of ``form.dtype``.
        scales: fp32 ``[outputs · inputs / form.block]``.
        form: bits and block; the block divides the inputs.
        shape: of the weight.
        dtype: of the weight that was quantised, and of products with it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    form: Blockwise
    shape: torch.Size
    dtype: torch.dtype

"""A quantised matrix, as the implementations of products take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.quantize import Blockwise


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight ``[outputs, inputs]``, or those of several experts ``[experts, outputs, inputs]``, quantised in blocks that do
    not cross rows.

    Attributes:
        values: ``[form.bytes(n)]``, of ``form.dtype``, n the elements of ``shape``.
        scales: fp32 ``[n / form.block]``.
        form: bits and block; the block divides the inputs.
        shape: of the weight.
        dtype: of the weight that was quantised, and of products with it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    form: Blockwise
    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Matrix:
        """The weight of one of several experts, ``[outputs, inputs]``. Shares the memory."""
        values, scales = (part[expert] for part in self.by_expert)
        return Matrix(values, scales, self.form, self.shape[1:], self.dtype)

    @property
    def by_expert(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``values`` and ``scales`` as ``[experts, …]``."""
        return self.values.view(len(self), -1), self.scales.view(len(self), -1)

    def __len__(self) -> int:
        return self.shape[0]

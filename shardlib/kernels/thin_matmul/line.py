"""Weights as compiled kernels take them: a line of numbers for each, `Matrix` in common/thin.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from shardlib.kernels.thin_matmul.arguments import Matrix

_NONE = (0,) * 7


def line(weight: torch.Tensor | Matrix | None, bias: torch.Tensor | None = None) -> tuple[int, ...]:
    """The line of a weight ``[outputs, inputs]``, or of several, ``[groups, outputs, inputs]``; zeros for none.

    It has addresses, so whoever uses it also keeps ``weight`` and ``bias``; both are contiguous.
    """
    if weight is None:
        return _NONE
    sizes = (*weight.shape[-2:], 0 if bias is None else bias.data_ptr())
    if isinstance(weight, Matrix):
        return weight.values.data_ptr(), weight.form.bits, weight.scales.data_ptr(), weight.form.block, *sizes
    return weight.data_ptr(), 8 * weight.element_size(), 0, 0, *sizes


def lines(*given: tuple[int, ...]) -> Any:
    """Lines, one after the other, in memory."""
    return (ctypes.c_int64 * sum(map(len, given)))(*[number for line in given for number in line])


def readable(tensors: Sequence[torch.Tensor | Matrix | None], dtype: torch.dtype) -> bool:
    """Whether compiled kernels can read all of these, of one dtype, at their addresses."""
    return dtype in (torch.float32, torch.bfloat16) and all(
        tensor.values.device.type == "cpu"
        if isinstance(tensor, Matrix)
        else (not has_torch_function((tensor,)) and tensor.device.type == "cpu" and tensor.is_contiguous())
        for tensor in tensors
        if tensor is not None
    )

"""Checks and dispatch of the operations on flat tensors of one shape: the steps of optimizers, and sums over elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import choose, load

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)


def check(
    tensors: Mapping[str, torch.Tensor], like: str, scale: torch.Tensor | None = None, read: tuple[str, ...] = ()
) -> None:
    """Refuses tensors whose shapes or dtypes a kernel would read or write wrongly.

    Args:
        tensors: argument name -> tensor, all of one shape.
        like: the name of the tensor whose shape and dtype the others must have. The dtype of ``copy`` is bf16 or fp16.
        scale: a factor, 0-d float64 on the tensors' device.
        read: names of tensors that are only read, which may have any dtype of `FLOATS`.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: a dtype is not supported.
    """
    given = dict(tensors) if scale is None else {**tensors, "scale": scale}
    check_tensors("an optimizer's step", given)
    first = tensors[like]
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {like} {tuple(first.shape)}")
        allowed = NARROW if name == "copy" else (first.dtype, *(FLOATS if name in read else ()))
        if tensor.dtype not in allowed:
            raise TypeError(f"{name} is {tensor.dtype} beside {like} of {first.dtype}, not one of {allowed}: cast it")
    if scale is not None and scale.dtype != torch.float64:
        raise TypeError(f"scale is {scale.dtype} on {scale.device}: make it float64 on {first.device}")


def serving(
    operation: str,
    reference: ModuleType,
    tensors: Mapping[str, torch.Tensor],
    like: str,
    dtypes: tuple[torch.dtype, ...],
    using: str | None,
) -> Any:
    """The implementation for checked tensors: plain torch for dtypes and strides that kernels do not take.

    Args:
        dtypes: those of the tensor ``like`` that kernels take.
        using: names an implementation; None takes what `shardlib.kernels.common.dispatch.choose` prefers.

    Raises:
        TypeError: ``using`` names a kernel that does not take these tensors.
    """
    first = tensors[like]
    if first.dtype not in dtypes or not all(tensor.is_contiguous() for tensor in tensors.values()):
        if using not in (None, "reference"):
            raise TypeError(f"{first.dtype} or strided tensors are served by plain torch, not by {using}")
        return reference
    return (choose(operation, first.device) if using is None else load(operation, using, first.device)).module


def read_elsewhere(
    module: Any, states: Sequence[torch.Tensor], old: tuple[torch.Tensor, ...] | None
) -> tuple[Any, ...]:
    """The further argument of a step whose ``states`` have their values in ``old``: that, where the implementation reads it
    there; where it works in place alone, none, and ``states`` have the values."""
    if old is None:
        return ()
    if getattr(module, "READS_OLD", False):
        return (old,)
    for state, value in zip(states, old, strict=True):
        state.copy_(value)
    return ()

"""What the operations on flat tensors of one shape have in common: their checks, and who serves them."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Kernels read and write by these sizes and dtypes: what does not have them must not reach one.

    Args:
        tensors: all to have the shape of, and all but ``copy`` (in 16 bits) and what is ``read`` also the dtype of
        like: the name of one of them.
        scale: a factor; 0-d float64 on their device.
        read: names of those that may be in any of `FLOATS` too.
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
    """The implementation for tensors that `check` has seen: plain torch for what the kernels do not take.

    Args:
        dtypes: in which kernels take what ``like`` names; they take contiguous tensors.
        using: names one, or None for what serves the device best.
    """
    first = tensors[like]
    if first.dtype not in dtypes or not all(tensor.is_contiguous() for tensor in tensors.values()):
        if using not in (None, "reference"):
            raise TypeError(f"{first.dtype} or strided tensors are served by plain torch, not by {using}")
        return reference
    return (choose(operation, first.device) if using is None else load(operation, using, first.device)).module

"""Tensors as rows along their last dimension, as the kernels of a transformer's layers read them."""

from __future__ import annotations

import torch

RANGES = 32  # of rows, whose sums the compiled kernels compute before they add them up; as in rows.h


def sizes(x: torch.Tensor) -> tuple[int, int]:
    """The number of rows of ``x``, and of elements of a row."""
    return x.shape[:-1].numel(), x.shape[-1]


def strided(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` and the distance of its rows in elements; copied only where the distances differ or rows are not contiguous.

    A slice of wider rows, such as one of ``x.chunk(2, -1)``, is not copied.
    """
    if x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1):
        try:
            return x, x.view(-1, x.shape[-1]).stride(0)
        except RuntimeError:  # the rows are not at equal distances
            pass
    return x.contiguous(), x.shape[-1]


def like(x: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of the shape and dtype of ``x``, for a kernel's result."""
    return x.new_empty(x.shape)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.to(dtype)``, whose call costs microseconds even where there is nothing to cast."""
    return x if x.dtype == dtype else x.to(dtype)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over rows."""
    return x.reshape(-1, x.shape[-1]).sum(0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that kernels compute in: fp32, or float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_vector(name: str, vector: torch.Tensor | None, x: torch.Tensor) -> None:
    """Refuses a weight or bias that does not have one number per column of ``x``.

    Raises:
        ValueError: ``vector`` has another shape.
    """
    if vector is not None and vector.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} has shape {tuple(vector.shape)}, and rows of x are {x.shape[-1]} wide: they must agree"
        )


def check_like(name: str, tensor: torch.Tensor, of: str, x: torch.Tensor) -> None:
    """Refuses two tensors of different shapes or dtypes.

    Raises:
        ValueError: the shapes or dtypes differ.
    """
    if tensor.shape != x.shape or tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and {of} {x.dtype} {tuple(x.shape)}: they must agree"
        )

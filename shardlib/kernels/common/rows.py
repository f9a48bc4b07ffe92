"""Tensors as rows of their last dimension, which is how the kernels of a transformer's layers go over them."""

from __future__ import annotations

import torch

PIECES = 32  # of the rows, which the compiled kernels sum on their own: as in rows.h


def sizes(x: torch.Tensor) -> tuple[int, int]:
    """How many rows ``x`` has, and of how many elements."""
    return x.shape[:-1].numel(), x.shape[-1]


def strided(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` as rows some elements apart, and how many; copied only where it cannot be read so. For parts of wider rows."""
    if x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1):
        try:
            return x, x.view(-1, x.shape[-1]).stride(0)
        except RuntimeError:  # the rows are not at equal distances
            pass
    return x.contiguous(), x.shape[-1]


def partial(columns: int) -> torch.Tensor:
    """Room on the CPU for the sums over pieces of the rows."""
    return torch.empty(PIECES, columns)


def like(x: torch.Tensor) -> torch.Tensor:
    """What kernels return for ``x``: of its shape and dtype, contiguous, not yet filled."""
    return x.new_empty(x.shape)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over rows."""
    return x.reshape(-1, x.shape[-1]).sum(0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """What sums and functions are computed in: fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_vector(name: str, vector: torch.Tensor | None, x: torch.Tensor) -> None:
    """A weight or bias is one number per column.

    Raises:
        ValueError: it is not.
    """
    if vector is not None and vector.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} has shape {tuple(vector.shape)}, and rows of x are {x.shape[-1]} wide: they must agree"
        )


def check_like(name: str, tensor: torch.Tensor, of: str, x: torch.Tensor) -> None:
    """Both have one shape and dtype.

    Raises:
        ValueError: they have not.
    """
    if tensor.shape != x.shape or tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and {of} {x.dtype} {tuple(x.shape)}: they must agree"
        )

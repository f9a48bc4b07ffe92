"""AdamW on flat tensors (arXiv 1711.05101, algorithm 2), in one pass over mixed dtypes.

With g the gradient times ``scale``, at step t and rate η:

    m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  p ← p·(1 − η·λ) − (m·η/(1−β1ᵗ)) / (√v·1/√(1−β2ᵗ) + ε)

and, where asked for, a copy of p in 16 bits. p, m and v have one dtype, fp32 under mixed precision; the gradient may have
another, of fp32, bf16 and fp16. What is computed is fp32, every product rounded before it is added, so that all
implementations give the same bits; the compiled ones take denormals for zero and write zero instead, plain torch keeps
them. float64 and strided tensors are served by plain torch.

Bytes moved per element: with fp32 states 24 for p, m and v in and out, 4 or 2 for the gradient, 2 for the copy; so 28 for a
bf16 gradient in and a bf16 parameter out, against 40 by torch's cast, fused step and cast. 15 operations, of which a
division and a root.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.adamw import reference
from shardlib.kernels.adamw.step import step_at
from shardlib.kernels.dispatch import on, one_device, serving

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
_NARROW = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_NARROW)


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    *,
    count: torch.Tensor,
    lr: torch.Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """One AdamW step in place on tensors of one shape. May overwrite ``grad``.

    Args:
        count: the step's number from 1, a 0-d float tensor.
        lr: 0-d float tensor.
        scale: multiplies the gradient first (unscaling and clipping folded into the pass), a 0-d float64 tensor.
        copy: is filled with the new parameter, bf16 or fp16.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: dtypes that are not served.
    """
    written = {"param": param, "mu": mu, "nu": nu} | ({} if copy is None else {"copy": copy})
    _check(written, grad)
    if scale is not None and (scale.dtype != torch.float64 or scale.device != param.device):
        raise TypeError(f"scale is {scale.dtype} on {scale.device}: make it float64 on {param.device}")
    step = step_at(count, lr, b1, b2, eps, weight_decay)
    with on(param.device):
        _implementation(written, using).adamw_(param, grad.contiguous(), mu, nu, copy, step, scale)


def _implementation(written: dict[str, torch.Tensor], using: str | None) -> Any:
    param = written["param"]
    if not all(tensor.is_contiguous() for tensor in written.values()):
        if using not in (None, "reference"):
            raise TypeError(f"strided tensors are served by plain torch, not by {using}")
        return reference
    return serving("adamw", param, using)


def _check(written: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
    """Kernels read and write by these sizes and dtypes: what does not have them must not reach one."""
    param, tensors = written["param"], written | {"grad": grad}
    for name, tensor in tensors.items():
        allowed = {"grad": (param.dtype, *_FLOATS), "copy": _NARROW}.get(name, (param.dtype,))
        if tensor.shape != param.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the parameter {tuple(param.shape)}")
        if tensor.dtype not in allowed:
            raise TypeError(
                f"{name} is {tensor.dtype} beside a parameter of {param.dtype}, not one of {allowed}: cast it"
            )
    one_device(tensors)

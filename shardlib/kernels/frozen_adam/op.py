"""Steps of Adam whose variance v is frozen, on flat tensors (arXiv 2102.02888, 2202.06009).

With m̄ for m where v > 0, and 0 where v = 0 (what no gradient ever reached would be divided by ε alone):

- `frozen_step_`, 1-bit Adam's, from momentum that all ranks have:  m ← m̄;  p ← p − η·(m̄/(√v + ε) + λ·p);
- `local_step_`, 0/1 Adam's between exchanges, from this rank's gradient g times ``scale``:  m ← β1·m + (1−β1)·g, then m̄;
  u ← u − η·m̄/(√v + ε), u being how far the rank has gone.

Everything is fp32, every product rounded before it is added, so that all implementations give the same bits; on the CPU the
compiled one takes denormals for zero and writes zero instead. Other dtypes and strided tensors are served by plain torch.

Bytes moved per element: 20 and 24, and 2 for a copy of p in 16 bits; plain torch moves 60 and more. 8 and 9 operations, of
which a division and a root.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.dispatch import choose, load, on, one_device
from shardlib.kernels.frozen_adam import reference


def frozen_step_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    *,
    lr: torch.Tensor,
    eps: float,
    weight_decay: float,
    copy: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """1-bit Adam's step in place on tensors of one shape and dtype.

    Args:
        lr: 0-d float tensor.
        copy: is filled with the new parameter, bf16 or fp16.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
    """
    tensors = {"param": param, "mu": mu, "nu": nu} | ({} if copy is None else {"copy": copy})
    _check(tensors)
    with on(param.device):
        _implementation(tensors, using).frozen_step_(param, mu, nu, copy, -float(lr), eps, weight_decay)


def frozen_move(
    param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, *, lr: torch.Tensor, eps: float, weight_decay: float
) -> torch.Tensor:
    """By how much `frozen_step_` moves the parameter, to the last bit, in new memory; writes to ``mu`` as it does."""
    return reference.frozen_move(param, mu, nu, -float(lr), eps, weight_decay)


def local_step_(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    moved: torch.Tensor,
    *,
    lr: torch.Tensor,
    b1: float,
    eps: float,
    scale: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """0/1 Adam's step of one rank: ``mu`` and ``moved`` in place, tensors of one shape and dtype.

    Args:
        lr: 0-d float tensor.
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: see `frozen_step_`.
    """
    tensors = {"grad": grad, "mu": mu, "nu": nu, "moved": moved}
    _check(tensors)
    with on(grad.device):
        _implementation(tensors, using).local_step_(grad, mu, nu, moved, -float(lr), b1, 1 - b1, eps, scale)


def implementation(device: torch.device) -> str:
    """Which implementation serves a device, and why none before it."""
    return str(choose("frozen_adam", device))


def _implementation(tensors: dict[str, torch.Tensor], using: str | None) -> Any:
    nu = tensors["nu"]
    if nu.dtype != torch.float32 or not all(tensor.is_contiguous() for tensor in tensors.values()):
        if using not in (None, "reference"):
            raise TypeError(f"{nu.dtype} and strided tensors are served by plain torch, not by {using}")
        return reference
    return (choose("frozen_adam", nu.device) if using is None else load("frozen_adam", using, nu.device)).module


def _check(tensors: dict[str, torch.Tensor]) -> None:
    """Kernels read and write by these sizes and dtypes: what does not have them must not reach one."""
    nu = tensors["nu"]
    for name, tensor in tensors.items():
        if tensor.shape != nu.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, nu {tuple(nu.shape)}")
        allowed = (torch.bfloat16, torch.float16) if name == "copy" else (nu.dtype,)
        if tensor.dtype not in allowed:
            raise TypeError(f"{name} is {tensor.dtype} beside nu of {nu.dtype}, not one of {allowed}: cast it")
    one_device(tensors)

"""Steps of Adam whose variance v is frozen, on flat tensors (arXiv 2102.02888, 2104.06069, 2202.06009).

m̄ is m where v > 0, and 0 where v = 0 (an element that no gradient has reached would be divided by ε alone). The steps:

- `local_momentum_`, what a rank sends, from its gradient g times ``scale``:  g ← β1·m + (1−β1)·g.
- `frozen_step_` of 1-bit Adam, from the momentum m that all ranks share:  m ← m̄;  p ← p − η·(m̄/(√v + ε) + λ·p).
- `local_step_` of 0/1 Adam between exchanges, with u the rank's movement since the last exchange:
  m ← β1·m + (1−β1)·g;  m ← m̄;  u ← u − η·m̄/(√v + ε).
- `fresh_step_` of 1-bit LAMB, from a received momentum m that was multiplied by a factor s, the last step's momentum b, and
  f, the variance as it would have become:  m ← m/s;  m ← m̄;  f ← β2·f + (1−β2)·((m̄ − β1·b)/(1−β1))²;  b ← m̄/(√v + ε).

Arithmetic is in fp32 and every product is rounded before it is added, so that all implementations give the same bits, except
that the compiled kernel on the CPU reads and writes denormals as zero. Plain torch computes other dtypes and strided tensors.

Bytes moved per element: 12, 20 (and 2 for a copy of p in 16 bits), 24 and 28; plain torch moves several times that. 4 to 14
operations, among them a root and a division in each step but the first, and two more in the last.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import check, serving
from shardlib.kernels.frozen_adam import reference
from shardlib.kernels.frozen_adam.arguments import FreshStep, FrozenStep, LocalMomentum, LocalStep

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def local_momentum_(
    grad: torch.Tensor, mu: torch.Tensor, *, b1: float, scale: torch.Tensor | None = None, using: str | None = None
) -> None:
    """Writes this rank's new momentum over ``grad``; tensors of one shape and dtype.

    Args:
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
    """
    tensors = {"grad": grad, "mu": mu}
    check(tensors, "mu", scale)
    with on(grad.device):
        _serving(tensors, using).local_momentum_(LocalMomentum(grad, mu, b1, 1 - b1, scale))


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
    check(tensors, "mu")
    with on(param.device):
        _serving(tensors, using).frozen_step_(FrozenStep(param, mu, nu, copy, -float(lr), eps, weight_decay))


def frozen_move(
    param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, *, lr: torch.Tensor, eps: float, weight_decay: float
) -> torch.Tensor:
    """The exact amount that `frozen_step_` adds to the parameter, as a new tensor; masks ``mu`` in place as the step does."""
    return reference.frozen_move(FrozenStep(param, mu, nu, None, -float(lr), eps, weight_decay))


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
    """0/1 Adam's step on one rank: updates ``mu`` and ``moved`` in place; tensors of one shape and dtype.

    Args:
        lr: 0-d float tensor.
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: see `frozen_step_`.
    """
    tensors = {"grad": grad, "mu": mu, "nu": nu, "moved": moved}
    check(tensors, "mu", scale)
    with on(grad.device):
        step = LocalStep(grad, mu, nu, moved, -float(lr), b1, 1 - b1, eps, scale)
        _serving(tensors, using).local_step_(step)


def fresh_step_(
    mu: torch.Tensor,
    before: torch.Tensor,
    nu: torch.Tensor,
    fresh: torch.Tensor,
    *,
    spread: torch.Tensor,
    b1: float,
    b2: float,
    eps: float,
    using: str | None = None,
) -> None:
    """1-bit LAMB's step after an exchange of momentum: updates all but ``nu`` in place; tensors of one shape and dtype.

    Args:
        mu: the received momentum, times ``spread``.
        before: the last step's momentum; receives the direction.
        fresh: the variance as it would have become.
        spread: the factor by which momentum was multiplied when sent, a 0-d float64 tensor on its device.
        using: see `frozen_step_`.
    """
    tensors = {"mu": mu, "before": before, "nu": nu, "fresh": fresh}
    check(tensors, "mu", spread)
    with on(mu.device):
        step = FreshStep(mu, before, nu, fresh, spread, b1, 1 - b1, b2, 1 - b2, eps)
        _serving(tensors, using).fresh_step_(step)


def _serving(tensors: dict[str, torch.Tensor], using: str | None) -> Any:
    return serving("frozen_adam", reference, tensors, "mu", (torch.float32,), using)

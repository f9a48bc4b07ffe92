"""Steps of Adam whose variance v is frozen, on flat tensors (arXiv 2102.02888, 2104.06069, 2202.06009).

With m̄ for m where v > 0, and 0 where v = 0 (what no gradient ever reached would be divided by ε alone):

- `own_momentum_`, what a rank sends of its gradient g times ``scale``:  g ← β1·m + (1−β1)·g;
- `frozen_step_`, 1-bit Adam's, from momentum that all ranks have:  m ← m̄;  p ← p − η·(m̄/(√v + ε) + λ·p);
- `local_step_`, 0/1 Adam's between exchanges:  m ← β1·m + (1−β1)·g, then m̄;  u ← u − η·m̄/(√v + ε), u being how far the
  rank has gone.

- `fresh_step_`, 1-bit LAMB's, from momentum m that came in times a factor s, and b, what it was before:  m ← m/s, then m̄;
  f ← β2·f + (1−β2)·((m̄ − β1·b)/(1−β1))², f being the variance as it would have become;  b ← m̄/(√v + ε).

Everything is fp32, every product rounded before it is added, so that all implementations give the same bits; on the CPU the
compiled one takes denormals for zero and writes zero instead. Other dtypes and strided tensors are served by plain torch.

Bytes moved per element: 12, 20 (and 2 for a copy of p in 16 bits), 24 and 28; plain torch moves several times that. 4 to 14
operations, of which in each step a root and a division, in the last two more.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import check, serving
from shardlib.kernels.frozen_adam import reference
from shardlib.kernels.frozen_adam.arguments import FreshStep, FrozenStep, LocalStep, OwnMomentum

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def own_momentum_(
    grad: torch.Tensor, mu: torch.Tensor, *, b1: float, scale: torch.Tensor | None = None, using: str | None = None
) -> None:
    """Momentum in the gradient's memory, of tensors of one shape and dtype.

    Args:
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
    """
    tensors = {"grad": grad, "mu": mu}
    check(tensors, "mu", scale)
    with on(grad.device):
        _serving(tensors, using).own_momentum_(OwnMomentum(grad, mu, b1, 1 - b1, scale))


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
    """By how much `frozen_step_` moves the parameter, to the last bit, in new memory; writes to ``mu`` as it does."""
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
    """0/1 Adam's step of one rank: ``mu`` and ``moved`` in place, tensors of one shape and dtype.

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
    """What 1-bit LAMB makes of momentum that came in; all but ``nu`` in place, tensors of one shape and dtype.

    Args:
        before: last step's momentum; afterwards the direction.
        spread: the factor that momentum was sent with, a 0-d float64 tensor on its device.
        using: see `frozen_step_`.
    """
    tensors = {"mu": mu, "before": before, "nu": nu, "fresh": fresh}
    check(tensors, "mu", spread)
    with on(mu.device):
        step = FreshStep(mu, before, nu, fresh, spread, b1, 1 - b1, b2, 1 - b2, eps)
        _serving(tensors, using).fresh_step_(step)


def _serving(tensors: dict[str, torch.Tensor], using: str | None) -> Any:
    return serving("frozen_adam", reference, tensors, "mu", (torch.float32,), using)

"""AdamW on flat tensors (arXiv 1711.05101, algorithm 2), in one pass over mixed dtypes.

With g the gradient times ``scale``, at step t and rate η:

    m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  p ← p·(1 − η·λ) − (m·η/(1−β1ᵗ)) / (√v·1/√(1−β2ᵗ) + ε)

and, if asked for, a copy of p in 16 bits. p, m and v have one dtype, fp32 under mixed precision; the gradient may have
another of fp32, bf16 and fp16. Arithmetic is in fp32 and every product is rounded before it is added, so that all
implementations give the same bits, except that compiled kernels read and write denormals as zero and plain torch keeps them.
Plain torch computes float64 and strided tensors.

`adam_direction_` updates m and v in the same way and writes  (m/(1−β1ᵗ)) / (√v·1/√(1−β2ᵗ) + ε) + λ·p  over the gradient,
for optimizers that compute the length of their steps from it (LAMB); all tensors have one dtype.

Bytes moved per element: with fp32 states 24 for p, m and v in and out, 4 or 2 for the gradient, 2 for the copy; so 28 for a
bf16 gradient in and a bf16 parameter out, against 40 by torch's cast, fused step and cast. 15 operations, among them a
division and a root. The direction: 28 bytes, 13 operations.
"""

from __future__ import annotations

import torch

from shardlib.kernels.adamw import reference
from shardlib.kernels.adamw.arguments import Direction, DirectionFactors, Factors, Old, Step
from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import FLOATS, check, read_elsewhere, serving

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    factors: Factors,
    *,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    old: Old | None = None,
    using: str | None = None,
) -> None:
    """One AdamW step in place on tensors of one shape.

    Args:
        factors: of the step, by `factors_at` of numbers.
        scale: multiplies the gradient first, a 0-d float64 tensor: unscaling and clipping take no pass of their own.
        copy: receives the new parameter, bf16 or fp16.
        old: the values before the step, which stay; ``param``, ``mu`` and ``nu`` are then only written.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: a dtype is not supported.
    """
    tensors = {"param": param, "grad": grad, "mu": mu, "nu": nu} | ({} if copy is None else {"copy": copy})
    tensors |= {} if old is None else {f"old.{name}": tensor for name, tensor in old._asdict().items()}
    check(tensors, "param", scale, read=("grad",))
    tensors["grad"] = grad = grad.contiguous()
    with on(param.device):
        module = serving("adamw", reference, tensors, "param", FLOATS, using)
        module.adamw_(Step(param, grad, mu, nu, copy, factors, scale), *read_elsewhere(module, (param, mu, nu), old))


def adam_direction_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    factors: DirectionFactors,
    *,
    scale: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """Writes Adam's direction over ``grad`` and updates both moments in place; tensors of one shape and dtype.

    Args:
        factors: of the step, by `direction_at`.
        scale, using: see `adamw_`.
    """
    tensors = {"param": param, "grad": grad, "mu": mu, "nu": nu}
    check(tensors, "param", scale)
    with on(param.device):
        module = serving("adamw", reference, tensors, "param", (torch.float32,), using)
        module.adam_direction_(Direction(param, grad, mu, nu, factors, scale))

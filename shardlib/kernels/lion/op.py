"""Lion on flat tensors (arXiv 2302.06675, algorithm 2), in one pass over mixed dtypes.

With g the gradient times ``scale``, sgn(0) = 0 and sgn(NaN) = NaN:

    p ← p·(1 − η·λ) − η·sgn(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g

and, if asked for, a copy of p in 16 bits. p and m have one dtype, fp32 under mixed precision; the gradient may have another
of fp32, bf16 and fp16. Arithmetic is in fp32 and every product is rounded before it is added, so that all implementations
give the same bits, except that the compiled kernel on the CPU reads and writes denormals as zero. Plain torch computes
float64 and strided tensors.

Bytes moved per element: with an fp32 state 16 for p and m in and out, 4 or 2 for the gradient, 2 for the copy. 11 operations.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common.dispatch import on
from shardlib.kernels.common.flat import FLOATS, check, read_elsewhere, serving
from shardlib.kernels.lion import reference
from shardlib.kernels.lion.arguments import Factors, Old, Step

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def lion_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    factors: Factors,
    *,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    old: Old | None = None,
    using: str | None = None,
) -> None:
    """One Lion step in place on tensors of one shape.

    Args:
        factors: of the step, by `factors_at` of numbers.
        scale, copy, old, using: as for `shardlib.kernels.adamw.adamw_`, which raises the same errors.
    """
    tensors = {"param": param, "grad": grad, "mu": mu} | ({} if copy is None else {"copy": copy})
    tensors |= {} if old is None else {f"old.{name}": tensor for name, tensor in old._asdict().items()}
    check(tensors, "param", scale, read=("grad",))
    tensors["grad"] = grad = grad.contiguous()
    with on(param.device):
        module = serving("lion", reference, tensors, "param", FLOATS, using)
        module.lion_(Step(param, grad, mu, copy, factors, scale), *read_elsewhere(module, (param, mu), old))

"""AdamW (arXiv 1711.05101, algorithm 2) on flat tensors with moments in 8 bits (arXiv 2110.02861), in one pass.

Blocks of 256 elements are independent. In each, m and v are decoded, updated with the parameter as in
`shardlib.kernels.adamw`, and coded again by their new largest magnitudes; see `shardlib.kernels.adamw8.codes`. The parameter
is updated by the moments before they are coded.

p and the gradient may each be fp32, bf16 or fp16. Arithmetic is in fp32 and every product is rounded before it is added, so
that all implementations give the same bits, except that the compiled kernel on the CPU takes denormals for zero. Plain torch
computes float64 and strided tensors. A gradient that is not finite makes the moments of its block NaN, in all later steps
too.

Bytes moved per element, fp32 p: 8 for p in and out, 2 + 2 for codes in and out, 4 or 2 for the gradient, 2 for the copy, and
16 per block for scales: 16.06 with bf16 gradient and copy, against 28 with moments in fp32. About 110 operations; only
AdamW's root and division are slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.adamw import AdamWFactors, AdamWStep
from shardlib.kernels.adamw import reference as adamw
from shardlib.kernels.adamw8.codes import BLOCK, SIGNED, UNSIGNED, DynamicMap
from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import one_device
from shardlib.kernels.common.dispatch import Plain, on
from shardlib.kernels.common.flat import FLOATS, check, serving

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "DynamicMap", "adamw8_"]

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}


class CodedStep(NamedTuple):
    """One AdamW step on flat tensors of one shape, and on the codes and scales of their moments."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    mu_scales: torch.Tensor
    nu: torch.Tensor
    nu_scales: torch.Tensor
    copy: torch.Tensor | None
    factors: AdamWFactors
    scale: torch.Tensor | None


def adamw8_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    mu_scales: torch.Tensor,
    nu: torch.Tensor,
    nu_scales: torch.Tensor,
    factors: AdamWFactors,
    *,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """One AdamW step in place.

    Args:
        mu, nu: codes of the moments, signed and unsigned, uint8 in the shape of ``param``.
        mu_scales, nu_scales: the scales of the codes' blocks, fp32 ``[⌈elements / 256⌉]``.
        factors: of the step, by `shardlib.kernels.adamw.factors_at` of numbers.
        scale, copy, using: as for `shardlib.kernels.adamw.adamw_`, which raises the same errors; "cuda" does not exist.
    """
    tensors = {"param": param, "grad": grad}
    tensors |= {name: tensor for name, tensor in (("copy", copy), ("scale", scale)) if tensor is not None}
    check(tensors, "param", read=("grad",))
    tensors["grad"] = grad.contiguous()
    blocks = ((param.numel() + BLOCK - 1) // BLOCK,)
    kept = {
        "mu": (mu, param.shape, torch.uint8),
        "nu": (nu, param.shape, torch.uint8),
        "mu_scales": (mu_scales, blocks, torch.float32),
        "nu_scales": (nu_scales, blocks, torch.float32),
    }
    for name, (tensor, shape, dtype) in kept.items():
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: for a param of shape {tuple(param.shape)} make it "
                f"{dtype} of shape {tuple(shape)}, contiguous"
            )
    one_device({"param": param} | {name: tensor for name, (tensor, _, _) in kept.items()})
    with on(param.device):
        serves = serving("adamw8", tensors, "param", FLOATS, using)
        serves.adamw8_(CodedStep(param, tensors["grad"], mu, mu_scales, nu, nu_scales, copy, factors, scale))


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback. Supports every dtype."""

    @staticmethod
    def adamw8_(step: CodedStep) -> None:
        param, grad, mu, mu_scales, nu, nu_scales, copy, factors, scale = step
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        m, v = SIGNED.decode(mu, mu_scales).to(wide), UNSIGNED.decode(nu, nu_scales).to(wide)
        adamw.adamw_(AdamWStep(param, grad, m, v, copy, factors, scale))
        for codes, scales, (new, largest) in ((mu, mu_scales, SIGNED.encode(m)), (nu, nu_scales, UNSIGNED.encode(v))):
            codes.copy_(new)
            scales.copy_(largest)


class cpu(native.Cpp, operation="adamw8", adamw8_step="pipi" + "p" * 5 + "ippl" + "f" * 9 + "i"):
    """By adamw8.cpp."""

    @staticmethod
    def adamw8_(step: CodedStep) -> None:
        param, grad, mu, mu_scales, nu, nu_scales, copy, factors, scale = step
        buffers = (*native.typed(param, grad), mu, mu_scales, nu, nu_scales)
        lines = (SIGNED.lines(param.device), UNSIGNED.lines(param.device))
        where = (*native.copied(copy), *lines, param.numel())
        cpu.library().adamw8_step(*buffers, *where, *factors, cpu.factor(scale), threads())

"""AdamW (arXiv 1711.05101, algorithm 2) on flat tensors with moments in 8 bits (arXiv 2110.02861), in one pass.

Blocks of 256 elements are independent. In each, m and v are decoded, updated with the parameter as in
`shardlib.kernels.adamw`, and coded again by their new largest magnitudes (`DynamicMap`). The parameter is updated by the
moments before they are coded.

p and the gradient may each be fp32, bf16 or fp16. Arithmetic is in fp32 and every product is rounded before it is added, so
that all implementations give the same bits, except that the compiled kernel on the CPU takes denormals for zero. Plain torch
computes float64 and strided tensors. A gradient that is not finite makes the moments of its block NaN, in all later steps
too.

Bytes moved per element, fp32 p: 8 for p in and out, 2 + 2 for codes in and out, 4 or 2 for the gradient, 2 for the copy, and
16 per block for scales: 16.06 with bf16 gradient and copy, against 28 with moments in fp32. About 110 operations; only
AdamW's root and division are slow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.adamw import AdamWFactors, AdamWStep
from shardlib.kernels.adamw import reference as adamw
from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_buffers, one_device
from shardlib.kernels.common.dispatch import Plain, on
from shardlib.kernels.common.flat import FLOATS, check, serving

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "DynamicMap", "adamw8_"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


BLOCK = 256  # elements that share a scale
_NORMAL = 2.0**-126  # the reciprocal of a smaller scale overflows fp32


@dataclass(frozen=True)
class DynamicMap:
    """A map from numbers to bytes and back, by block-wise dynamic quantisation (arXiv 2110.02861, section 2).

    A block of 256 numbers is divided by its largest magnitude. The quotient, at most 1, is coded by its decade and a linear
    fraction within it: decade e = 0, 1, … from 10^−e down has half as many codes as the decade above it, the lowest has one
    code, and 0 has one. So code 2^(bits−e) − 1 is 10^−e, and between two of these codes numbers are evenly spaced.

    As a function of the number, the code is a concave chain of straight lines, one for each decade: the code is the minimum
    over the lines, rounded, and the number of a code is the maximum over the inverse lines. There is no table and no branch,
    and the same few operations give the same bits everywhere.

    Attributes:
        bits: of a magnitude: 7 beside a sign bit, or 8 for numbers that are never negative. With 8 bits only 0 is coded as
            0: a step divides by the root of a second moment, which must not be lost to rounding.
    """

    bits: int

    @functools.cache  # noqa: B019  # the two maps live as long as the program
    def lines(self, device: torch.device) -> torch.Tensor:
        """The lines of the decades, the highest first: slope and offset of the code, then of the number; ``[bits, 4]``."""
        rows = []
        for decade in range(self.bits):
            top, last = 10.0**-decade, 2 ** (self.bits - decade) - 1
            lowest = decade == self.bits - 1  # its line goes through 0
            gap = torch.tensor(top if lowest else 0.9 * top / 2 ** (self.bits - 1 - decade))
            # Each line gives its decade's top exactly, so that 1 and 0 are coded without an error.
            offset = torch.tensor(top).double() - (gap * last).double()
            rows.append([1 / gap.item(), last - top / gap.item(), gap.item(), offset.item()])
        return torch.tensor(rows, dtype=torch.float32, device=device)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes, bytes in the shape of ``x`` (fp32 or float64), and the scales, fp32 ``[⌈elements / BLOCK⌉]``.

        A block whose largest magnitude is a denormal is coded as zeros. The scale of a block with NaN or infinity is that
        value and its codes are 0, so that the whole block is decoded as NaN.
        """
        padded = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(dim=1).float() if len(padded) else x.new_zeros(0, dtype=torch.float32)
        scales = torch.where(largest < _NORMAL, 0.0, largest)
        padded = torch.where(scales.isfinite()[:, None], padded, 0.0)
        fractions = padded.abs() * torch.where((scales > 0) & scales.isfinite(), 1 / scales, 0.0)[:, None]
        height, *lower_decades = (fractions * slope + offset for slope, offset, _, _ in self.lines(x.device))
        for line in lower_decades:
            height = torch.minimum(height, line)
        code = height.round().to(torch.int32)
        if self.bits == 8:
            code = torch.where(fractions > 0, code.clamp(min=1), code)
        else:
            code |= padded.signbit() * 128
        return code.to(torch.uint8).view(-1)[: x.numel()].view(x.shape), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers of ``codes``, fp32 in their shape."""
        magnitudes = (codes & ((1 << self.bits) - 1)).float()
        fractions, *lower_decades = (magnitudes * gap + offset for _, _, gap, offset in self.lines(codes.device))
        for line in lower_decades:
            fractions = torch.maximum(fractions, line)
        if self.bits == 7:
            fractions = torch.where(codes >= 128, -fractions, fractions)
        return fractions * scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)


SIGNED, UNSIGNED = DynamicMap(7), DynamicMap(8)


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
    codes, blocks = (param.shape, (torch.uint8,)), ((-(-param.numel() // BLOCK),), FLOATS[:1])
    kept = {
        "mu": (mu, *codes),
        "nu": (nu, *codes),
        "mu_scales": (mu_scales, *blocks),
        "nu_scales": (nu_scales, *blocks),
    }
    check_buffers(tuple(kept), **kept)
    one_device({"param": param, "mu": mu})
    with on(param.device):
        serves = serving("adamw8", tensors, "param", FLOATS, using)
        serves.adamw8_(CodedStep(param, tensors["grad"], mu, mu_scales, nu, nu_scales, copy, factors, scale))


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback."""

    @staticmethod
    def adamw8_(step: CodedStep) -> None:
        param, grad, mu, mu_scales, nu, nu_scales, copy, factors, scale = step
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        m, v = SIGNED.decode(mu, mu_scales).to(wide), UNSIGNED.decode(nu, nu_scales).to(wide)
        adamw.adamw_(AdamWStep(param, grad, m, v, copy, factors, scale))
        for codes, scales, (new, largest) in ((mu, mu_scales, SIGNED.encode(m)), (nu, nu_scales, UNSIGNED.encode(v))):
            codes.copy_(new)
            scales.copy_(largest)


class cpu(native.Compiled, adamw8_step="pipi" + "p" * 5 + "ippl" + "f" * 9 + "i"):
    """By adamw8.cpp."""

    @staticmethod
    def adamw8_(step: CodedStep) -> None:
        *buffers, copy, factors, scale = step
        param, grad, *codes = buffers
        lines = (SIGNED.lines(param.device), UNSIGNED.lines(param.device))
        cpu.library().adamw8_step(
            *(param, native.DTYPES[param.dtype], grad, native.DTYPES[grad.dtype], *codes),
            *(copy, -1 if copy is None else native.DTYPES[copy.dtype], *lines, param.numel()),
            *(*factors, 1.0 if scale is None else float(scale), threads()),
        )

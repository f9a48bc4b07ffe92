"""Numbers in 8 bits by block-wise dynamic quantisation (arXiv 2110.02861, section 2), in plain torch.

A block of 256 numbers is divided by its largest magnitude. The quotient, at most 1, is coded by its decade and a linear
fraction within it: decade e = 0, 1, … from 10^−e down has half as many codes as the decade above it, the lowest has one
code, and 0 has one. So

    code 2^(bits−e) − 1 is 10^−e, and between two of these codes numbers are evenly spaced.

As a function of the number, the code is a concave chain of straight lines, one for each decade: the code is the minimum
over the lines, rounded, and the number of a code is the maximum over the inverse lines. There is no table and no branch,
and the same few operations give the same bits everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

BLOCK = 256  # elements that share a scale
_NORMAL = 2.0**-126  # the reciprocal of a smaller scale overflows fp32


@dataclass(frozen=True)
class DynamicMap:
    """A map from numbers to bytes and back.

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

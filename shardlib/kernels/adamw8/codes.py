"""Numbers in 8 bits by block-wise dynamic quantisation (arXiv 2110.02861, section 2), in plain torch.

A block of 256 numbers is divided by its largest magnitude. What is left, at most 1, is coded by its decade and a linear
fraction within it: decade e = 0, 1, … from 10^−e down has half as many codes as the one above it, the lowest has one, and
below that there is 0. So

    code 2^(bits−e) − 1 is 10^−e, and between two of these codes numbers are evenly spaced.

Drawn over the numbers the codes are then a concave chain of straight lines, one for each decade: the code is the lowest
line, rounded, and the number of a code is the highest of the inverse lines. There is no table and no branch, and the same
few operations give the same bits everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

BLOCK = 256  # elements that share a scale
_NORMAL = 2.0**-126  # scales below it have no reciprocal in fp32


@dataclass(frozen=True)
class DynamicMap:
    """From numbers to bytes and back.

    Attributes:
        bits: of a magnitude: 7 beside a sign, or 8 of numbers that are never negative. Of the latter only 0 becomes 0:
            what is divided by the root of a second moment must not meet one that was lost.
    """

    bits: int

    @functools.cache  # noqa: B019  # of two maps that live as long as the program
    def lines(self, device: torch.device) -> torch.Tensor:
        """For each decade from the highest: slope and offset to codes, then of the way back, fp32 ``[bits, 4]``."""
        rows = []
        for decade in range(self.bits):
            top, last = 10.0**-decade, 2 ** (self.bits - decade) - 1
            lowest = decade == self.bits - 1  # reaches down to 0
            gap = torch.tensor(top if lowest else 0.9 * top / 2 ** (self.bits - 1 - decade))
            # Meets the top exactly: 1 and 0 have codes of their own.
            offset = torch.tensor(top).double() - (gap * last).double()
            rows.append([1 / gap.item(), last - top / gap.item(), gap.item(), offset.item()])
        return torch.tensor(rows, dtype=torch.float32, device=device)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes in the shape of ``x`` (fp32 or float64), and scales fp32 ``[⌈elements / BLOCK⌉]``.

        A block whose largest magnitude is a denormal becomes zero. One with NaN or infinity gets that for its scale, and
        codes of zero: all of it is NaN from then on.
        """
        padded = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(dim=1).float() if len(padded) else x.new_zeros(0, dtype=torch.float32)
        scales = torch.where(largest < _NORMAL, 0.0, largest)
        padded = torch.where(scales.isfinite()[:, None], padded, 0.0)
        parts = padded.abs() * torch.where((scales > 0) & scales.isfinite(), 1 / scales, 0.0)[:, None]
        height, *others = (parts * rise + start for rise, start, _, _ in self.lines(x.device))
        for other in others:
            height = torch.minimum(height, other)
        code = height.round().to(torch.int32)
        if self.bits == 8:
            code = torch.where(parts > 0, code.clamp(min=1), code)
        else:
            code |= padded.signbit() * 128
        return code.to(torch.uint8).view(-1)[: x.numel()].view(x.shape), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers, fp32 in the shape of ``codes``."""
        magnitudes = (codes & ((1 << self.bits) - 1)).float()
        found, *others = (magnitudes * gap + offset for _, _, gap, offset in self.lines(codes.device))
        for other in others:
            found = torch.maximum(found, other)
        if self.bits == 7:
            found = torch.where(codes >= 128, -found, found)
        return found * scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)


SIGNED, UNSIGNED = DynamicMap(7), DynamicMap(8)

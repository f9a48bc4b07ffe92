"""1-bit compression in plain torch: the oracle of the kernels, and the fallback. Also serves float64.

See `shardlib.kernels.onebit.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.kernels.onebit.segments import Segments


def load(device: torch.device) -> str:
    return "reference"


def compress(x: torch.Tensor, residual: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    c = x.to(residual.dtype) + residual
    sums = _sums(c[: segments.elements].double().square(), segments)
    scales = (sums / segments.on(c.device).diff().clamp(min=1)).sqrt().to(c.dtype)
    positive = c >= 0
    positive[segments.elements :] = True
    spread = segments.spread(scales)
    residual.copy_(torch.where(spread.isfinite(), c - torch.where(positive, spread, -spread), residual))
    residual[segments.elements :] = 0
    return _pack(positive), scales


def average(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
    out.zero_()
    for positive, spread in zip(_unpack(bits, segments.length), segments.spread(scales)):
        out += torch.where(positive, spread, -spread)
    out /= torch.full_like(out, len(bits))  # CUDA would multiply by a Python number's reciprocal


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    mean = torch.empty_like(residual)
    average(bits, scales, segments, mean)
    return compress(mean, residual, segments)


def _sums(squares: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The sums over each segment, ``[count]``."""
    if segments.block is not None:
        rows = torch.nn.functional.pad(squares, (0, segments.count * segments.block - len(squares)))
        return rows.view(segments.count, segments.block).sum(dim=1)
    split = squares.split(segments.offsets.diff().tolist())
    return torch.cat([squares.new_empty(0), *(segment.sum().view(1) for segment in split)])


def _pack(positive: torch.Tensor) -> torch.Tensor:
    """bool ``[d]`` -> uint8 ``[⌈d/8⌉]``, element 0 in the lowest bit, ones at the end."""
    bits = torch.nn.functional.pad(positive, (0, -len(positive) % 8), value=True).view(-1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def _unpack(bits: torch.Tensor, length: int) -> torch.Tensor:
    """uint8 ``[n, ⌈d/8⌉]`` -> bool ``[n, d]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :length].bool()

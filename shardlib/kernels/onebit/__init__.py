"""1-bit compression with error feedback (1-bit Adam, arXiv 2102.02888), on flat buffers.

Over a segment of d elements, with sgn(x) = +1 for x ≥ 0 (−0.0 too) and −1 elsewhere:

- worker: c = x + e;  s = ‖c‖₂ / √d;  bits = (c ≥ 0);  e ← c − s·sgn(c).
- server, from n ranks' bits and scales: y = (1/n) Σ_r s_r·sgn_r, summed in rank order; then the worker's step on c = y + e
  with the server's own e.

Here e is the residual. Bits are packed eight to a byte, the first in the lowest bit. Padding has the bit 1 and the residual
0, and adds nothing to a scale. Sums of squares are in fp64, all else in the dtype of the residual: fp32, or float64 by plain
torch. All implementations give the same bits and residuals for the same scales; scales differ by the rounding of fp64 sums
in different orders, at most one unit in the last place.

Bytes moved per element in fp32: 12.125 if a segment fits the cache (x and e in, e and bits out), 20.125 if x and e are read
twice; plain torch takes about 150. The time of arithmetic is negligible.

NaN or infinity in a segment makes the segment's scale NaN or infinity and leaves its residual unchanged, so check the scales
before using other results.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_buffers
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.flat import FLOATS
from shardlib.kernels.onebit.segments import Segments

__all__ = ["Segments", "average", "average_compress", "compress", "decompress"]

# Triton's were the faster ones on an H100.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("triton", "cuda"),
}
_WIDE = (torch.float32, torch.float64)


def compress(
    x: torch.Tensor, residual: torch.Tensor, segments: Segments, *, using: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker's step; updates ``residual`` in place.

    Args:
        x: ``[segments.length]``, fp32, bf16 or fp16 (or float64 with a float64 residual).
        residual: ``[segments.length]``, fp32, contiguous.

    Returns:
        bits uint8 ``[segments.bytes]``, and scales ``[segments.count]`` of the residual's dtype; 0 for empty segments.
    """
    shape = (segments.length,)
    check_buffers(("residual",), x=(x, shape, (*FLOATS, torch.float64)), residual=(residual, shape, _WIDE))
    if x.dtype == torch.float64 != residual.dtype:
        raise TypeError(f"x is float64 and the residual {residual.dtype}: keep the residual in float64, or cast x")
    with on(residual.device):
        return serving("onebit", residual, using).compress(x, residual, segments)


def decompress(
    bits: torch.Tensor,
    scales: torch.Tensor,
    segments: Segments,
    *,
    out: torch.Tensor | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """``[segments.length]``: ±scale, and 0 in the padding, from bits ``[segments.bytes]`` and scales ``[count]``."""
    return average(bits.unsqueeze(0), scales.unsqueeze(0), segments, out=out, using=using)


def average(
    bits: torch.Tensor,
    scales: torch.Tensor,
    segments: Segments,
    *,
    out: torch.Tensor | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """The mean of the buffers that n ranks compressed, ``[segments.length]``, 0 in the padding.

    Args:
        bits: ``[n, segments.bytes]``.
        scales: ``[n, segments.count]``.
        out: receives the mean, if given; allocating memory takes longer than the average itself.
    """
    if out is None:
        out = scales.new_empty(segments.length)
    check_buffers(("out",), **_sent(bits, scales, segments), out=(out, (segments.length,), (scales.dtype,)))
    with on(scales.device):
        serving("onebit", scales, using).average(bits.contiguous(), scales.contiguous(), segments, out)
    return out


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments, *, using: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The server's step: `average` and `compress` in one, without storing the mean. Updates ``residual`` in place.

    Args:
        bits: ``[n, segments.bytes]``.
        scales: ``[n, segments.count]``.
        residual: ``[segments.length]``, of the scales' dtype, contiguous.

    Returns:
        bits and scales, as in `compress`.
    """
    kept = (residual, (segments.length,), (scales.dtype,))
    check_buffers(("residual",), **_sent(bits, scales, segments), residual=kept)
    with on(residual.device):
        chosen = serving("onebit", residual, using)
        return chosen.average_compress(bits.contiguous(), scales.contiguous(), residual, segments)


def _sent(bits: torch.Tensor, scales: torch.Tensor, segments: Segments) -> dict[str, Any]:
    """What `check_buffers` is to expect of ranks' bits and scales."""
    return {
        "bits": (bits, (len(bits), segments.bytes), (torch.uint8,)),
        "scales": (scales, (len(bits), segments.count), _WIDE),
    }


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback. Also serves float64."""

    @staticmethod
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

    @staticmethod
    def average(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
        out.zero_()
        for positive, spread in zip(_unpack(bits, segments.length), segments.spread(scales)):
            out += torch.where(positive, spread, -spread)
        out /= torch.full_like(out, len(bits))  # CUDA would multiply by a Python number's reciprocal

    @staticmethod
    def average_compress(
        bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.empty_like(residual)
        reference.average(bits, scales, segments, mean)
        return reference.compress(mean, residual, segments)


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


class cpu(
    native.Compiled,
    onebit_compress="pippllllpppi",
    onebit_average="pplpllllpi",
    onebit_average_compress="pplppllllpppi",
):
    """By onebit.cpp."""

    EACH = 1 << 16  # elements of a span, as in onebit.cpp

    @classmethod
    def compress(cls, x: torch.Tensor, residual: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        x = native.readable(x)
        bits, scales, partial = cls._outputs(segments, x.device)
        where = (*cls._table(segments, x.device), bits, scales, partial, cls.runs_on(x.device))
        cls.library().onebit_compress(x, native.DTYPES[x.dtype], residual, *where)
        return bits, scales

    @classmethod
    def average(cls, bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
        where = (*cls._table(segments, out.device), out, cls.runs_on(out.device))
        cls.library().onebit_average(bits, scales, len(bits), *where)

    @classmethod
    def average_compress(
        cls, bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_bits, out_scales, partial = cls._outputs(segments, residual.device)
        table = cls._table(segments, residual.device)
        where = (*table, out_bits, out_scales, partial, cls.runs_on(residual.device))
        cls.library().onebit_average_compress(bits, scales, len(bits), residual, *where)
        return out_bits, out_scales

    @classmethod
    def _outputs(cls, segments: Segments, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Empty tensors for signs, scales, and the sums over each segment's elements in a span or tile."""
        sums = 0 if cls._in_one_pass(segments) else -(-segments.length // cls.EACH) + segments.count
        return (
            torch.empty(segments.bytes, dtype=torch.uint8, device=device),
            torch.empty(segments.count, device=device),
            torch.empty(sums, dtype=torch.float64, device=device),
        )

    @staticmethod
    def _in_one_pass(segments: Segments) -> bool:
        """Whether scales need no partial sums."""
        return False

    @staticmethod
    def _table(segments: Segments, device: torch.device) -> tuple[torch.Tensor | int | None, ...]:
        """The arguments by which the C functions take ``segments``."""
        offsets = segments.offsets if segments.block is None else None
        return offsets, segments.block or 0, segments.count, segments.elements, segments.length


class cuda(
    cpu,
    onebit_compress="pipppllllpppp",
    onebit_average="pplppllllpp",
    onebit_average_compress="pplpppllllpppp",
):
    """By onebit.cu, in one pass where blocks allow it."""

    EACH = 2048  # of a tile, as in onebit.cu

    @staticmethod
    def _in_one_pass(segments: Segments) -> bool:
        return segments.block is not None and segments.block % 32 == 0 and segments.block <= 4096

    @staticmethod
    def _table(segments: Segments, device: torch.device) -> tuple[torch.Tensor | int | None, ...]:
        sizes = (segments.count, segments.elements, segments.length)
        if cuda._in_one_pass(segments):
            return None, None, segments.block, *sizes
        return segments.on(device), segments.first(cuda.EACH, device), 0, *sizes

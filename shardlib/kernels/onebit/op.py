"""1-bit compression with error feedback (1-bit Adam, arXiv 2102.02888), on flat buffers.

Over a segment of d elements, with sgn(x) = +1 for x ≥ 0 (−0.0 too) and −1 elsewhere:

- worker: c = x + e;  s = ‖c‖₂ / √d;  bits = (c ≥ 0);  e ← c − s·sgn(c).
- server, of n ranks' bits and scales: y = (1/n) Σ_r s_r·sgn_r, summed in rank order; then the same of c = y + e.

Bits are packed eight to a byte, the first in the lowest bit. Padding has the bits 1 and the error 0 and adds nothing to a
scale. Sums of squares are in fp64; the rest is in the dtype of the error, fp32 (float64 is served by plain torch). All
implementations give the same bits and errors for the same scales; scales differ by what rounding fp64 sums in another
order does, one unit in the last place at most.

Bytes moved per element in fp32: 12.125 where a segment fits the cache (x and e in, e and bits out), 20.125 where x and e
are read twice; plain torch takes about 150. Arithmetic is of no account beside that.

NaN or infinity in a segment makes that segment's scale NaN or infinity, and leaves its errors as they were: look at the
scales before using anything else. ``using`` names one implementation ("cpu", "cuda", "triton", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common.arguments import one_device
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.onebit.segments import Segments

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def compress(
    x: torch.Tensor, error: torch.Tensor, segments: Segments, *, using: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker's step; updates ``error`` in place.

    Args:
        x: ``[segments.length]``, fp32, bf16 or fp16 (or float64 with a float64 error).
        error: ``[segments.length]``, fp32, contiguous.

    Returns:
        bits uint8 ``[segments.bytes]``, and scales ``[segments.count]`` of the error's dtype; 0 for empty segments.
    """
    _check(x=(x, (segments.length,)), error=(error, (segments.length,)))
    if x.dtype == torch.float64 != error.dtype:
        raise TypeError(f"x is float64 and the error {error.dtype}: keep the error in float64, or cast x")
    with on(error.device):
        return serving("onebit", error, using).compress(x, error, segments)


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
    """The mean of what n ranks sent, ``[segments.length]``, 0 in the padding.

    Args:
        bits: ``[n, segments.bytes]``.
        scales: ``[n, segments.count]``.
        out: is filled, where given; new memory costs more than the average itself.
    """
    if out is None:
        out = scales.new_empty(segments.length)
    _check_sent(bits, scales, segments, out=out)
    with on(scales.device):
        serving("onebit", scales, using).average(bits.contiguous(), scales.contiguous(), segments, out)
    return out


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, error: torch.Tensor, segments: Segments, *, using: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The server's step: `average` and `compress` in one, without storing the mean. Updates ``error`` in place.

    Args:
        bits: ``[n, segments.bytes]``.
        scales: ``[n, segments.count]``.
        error: ``[segments.length]``, of the scales' dtype, contiguous.

    Returns:
        As `compress`.
    """
    _check_sent(bits, scales, segments, error=error)
    with on(error.device):
        chosen = serving("onebit", error, using)
        return chosen.average_compress(bits.contiguous(), scales.contiguous(), error, segments)


def _check_sent(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, **filled: torch.Tensor) -> None:
    """What ranks sent, and what is filled from it, of the scales' dtype."""
    shapes = {name: (tensor, (segments.length,)) for name, tensor in filled.items()}
    _check(bits=(bits, (len(bits), segments.bytes)), scales=(scales, (len(bits), segments.count)), **shapes)
    for name, tensor in filled.items():
        if tensor.dtype != scales.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and the scales are {scales.dtype}: cast one")


def _check(**tensors: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    """Kernels read and write by these sizes: what does not have them must not reach one."""
    floats = (torch.float32, torch.float64)
    dtypes = {"x": (*floats, torch.bfloat16, torch.float16), "bits": (torch.uint8,)}
    for name, (tensor, shape) in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its segments ask for {shape}")
        if tensor.dtype not in dtypes.get(name, floats):
            raise TypeError(f"{name} is {tensor.dtype}, not one of {dtypes.get(name, floats)}: cast it")
        if name in ("error", "out") and not tensor.is_contiguous():
            raise ValueError(f"{name} is filled in place, so it must be contiguous")
    one_device({name: tensor for name, (tensor, _) in tensors.items()})

"""Blockwise quantisation by Triton kernels: one pass over tiles of whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles
from shardlib.kernels.quantize import Blockwise, Quantized

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds a float of up to 22 bits to nearest even

load: tiles.Loader = tiles.triton_name


def quantize(x: torch.Tensor, residual: torch.Tensor | None, out: Quantized) -> None:
    _quantize(x.contiguous(), (x, x, 0, 0), len(x), residual, out)


def dequantize_sum(sent: Quantized, out: torch.Tensor) -> None:
    values, scales, form = sent
    sizes = (len(values), form.bytes(len(out)), form.scales(len(out)), len(out))
    shape = _shape(form)
    grid = (triton.cdiv(len(out), shape["TILE"]),)
    _dequantize_sum[grid](values, scales, *sizes, out, BITS=form.bits, **shape, **tiles.EXACT)


def dequantize_sum_quantize(sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized) -> None:
    values, scales, form = sent
    summed = (values, scales, len(values), form.bytes(elements))
    _quantize(scales, summed, elements, residual, out, sent_bits=form.bits)


def _quantize(
    x: torch.Tensor,
    sent: tuple[torch.Tensor, torch.Tensor, int, int],
    elements: int,
    residual: torch.Tensor | None,
    out: Quantized,
    sent_bits: int = 0,
) -> None:
    """Quantises ``x``, or the sum of the ranks' values ``sent`` of ``sent_bits`` bits, if not 0: then ``x`` is not read."""
    values, scales, form = out
    shape = _shape(form)
    _quantize_blocks[(triton.cdiv(elements, shape["TILE"]),)](
        x,
        *sent,
        residual,
        values,
        scales,
        len(scales),
        elements,
        BITS=form.bits,
        SENT_BITS=sent_bits,
        FEEDBACK=residual is not None,
        **shape,
        **tiles.EXACT,
    )


def _shape(form: Blockwise) -> dict[str, int]:
    """The shape of a tile: whole blocks, 8 elements per thread."""
    tile = max(2048, form.block)
    return {"TILE": tile, "BLOCK": form.block, "num_warps": tile // 256}


@triton.jit
def _sum(at, valid, values, scales, ranks, size, count, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Σ value · scale, summed in rank order; a rank has ``size`` bytes of values and ``count`` scales."""
    total = tl.zeros(at.shape, tl.float32)
    for r in range(ranks):
        if BITS == 8:
            q = tl.load(values + r * size + at, mask=valid, other=0).to(tl.int32)
        else:
            pair = tl.load(values + r * size + at // 2, mask=valid, other=0).to(tl.int32)
            q = (((pair >> ((at % 2) * 4).to(tl.int32)) & 15) ^ 8) - 8
        total += q.to(tl.float32) * tl.load(scales + r * count + at // BLOCK, mask=valid, other=0.0)
    return total


@triton.jit
def _dequantize_sum(
    values, scales, ranks, size, count, elements, out,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < elements
    total = _sum(at, valid, values, scales, ranks, size, count, BLOCK, BITS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _quantize_blocks(
    x, sent_values, sent_scales, ranks, sent_size, residual, values, scales, count, elements,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SENT_BITS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = at < elements
    if SENT_BITS == 0:
        c = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    else:
        c = _sum(at, valid, sent_values, sent_scales, ranks, sent_size, count, BLOCK, SENT_BITS)
    if FEEDBACK:
        c += tl.load(residual + at, mask=valid, other=0.0)
    # Magnitudes are compared as integers, which order like the floats with infinity and then NaN on top.
    most = tl.max(c.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    largest = (1 << (BITS - 1)) - 1.0
    scale = tl.div_rn(most, tl.zeros_like(most) + largest)
    tl.store(scales + block, scale, mask=block < count)
    finite = (scale - scale == 0)[:, None]
    usable = finite & (scale > 0)[:, None]
    spread = scale[:, None] + tl.zeros_like(c)
    steps = tl.where(usable, tl.div_rn(c, spread), 0.0)
    steps = tl.minimum(tl.maximum(steps, -largest), largest)
    steps = (steps + _ROUND) - _ROUND
    if FEEDBACK:
        tl.store(residual + at, c - steps * spread, mask=valid & finite)
    q = tl.reshape(steps.to(tl.int32), (TILE,))
    if BITS == 8:
        flat = tile * TILE + tl.arange(0, TILE)
        tl.store(values + flat, q.to(tl.int8), mask=flat < elements)
    else:
        pairs = (tl.reshape(q, (TILE // 2, 2)) & 15) << (tl.arange(0, 2) * 4)[None, :]
        flat = tile * (TILE // 2) + tl.arange(0, TILE // 2)
        tl.store(values + flat, tl.sum(pairs, axis=1).to(tl.uint8), mask=flat < (elements + 1) // 2)

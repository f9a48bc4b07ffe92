"""1-bit compression by Triton kernels.

Equal blocks that divide a tile take one pass; other segments take three kernels: signs and sums of squares per tile and
segment, scales, residuals. Sums are fp64, within a tile by a tree and then over tiles in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles
from shardlib.kernels.onebit.segments import Segments

TILE = 2048

load: tiles.Loader = tiles.triton_name


def compress(x: torch.Tensor, residual: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    scales = residual.new_empty(0, segments.count)
    return _compress(x.contiguous(), residual, residual.new_empty(0, dtype=torch.uint8), scales, segments)


def average(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
    block = segments.block or 0
    _average[(_tiles(segments),)](
        bits, scales, len(bits), *_table(segments, block, out.device), out, TILE=TILE, BLOCK=block, **tiles.EXACT
    )


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    return _compress(residual, residual, bits, scales, segments)


def _compress(
    x: torch.Tensor, residual: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compresses ``x``, or the average of ranks' ``bits`` and ``scales`` if there are any: then ``x`` is not read."""
    device = residual.device
    out_bits = torch.empty(segments.bytes, dtype=torch.uint8, device=device)
    out_scales = residual.new_empty(segments.count)
    source = (x, residual, bits, scales, len(scales))
    options = {"TILE": TILE, "MEAN": len(scales) > 0, **tiles.EXACT}
    grid = (_tiles(segments),)
    block = segments.block or 0
    if 0 < block <= TILE and block & (block - 1) == 0:
        sizes = (segments.count, segments.elements, segments.length)
        _blocks[grid](*source, *sizes, out_bits, out_scales, BLOCK=block, **options)
        return out_bits, out_scales
    table = _table(segments, 0, device)
    partial = torch.empty(grid[0] + segments.count, dtype=torch.float64, device=device)
    _signs[grid](*source, *table, out_bits, partial, **options)
    _scales[(segments.count,)](partial, table[0], out_scales, TILE=TILE, STEP=1024, **tiles.EXACT)
    _residuals[grid](*source, *table, out_scales, **options)
    return out_bits, out_scales


def _tiles(segments: Segments) -> int:
    return triton.cdiv(segments.length, TILE)


def _table(segments: Segments, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """The arguments by which the kernels take ``segments``; tables are empty for blocks."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    offsets, first = (none, none) if block else (segments.on(device), segments.first(TILE, device))
    return offsets, first, segments.count, segments.elements, segments.length


@triton.jit
def _segment(at, offsets, first, tile):
    """The number of the segment of every element of a tile."""
    low = tl.load(first + tile)
    segment = tl.zeros(at.shape, tl.int64) + low
    for j in range(low + 1, tl.load(first + tile + 1) + 1):
        segment = tl.where(at >= tl.load(offsets + j), j, segment)
    return segment


@triton.jit
def _mean(at, valid, segment, bits, scales, ranks, count, length):
    """(1/n) Σ ±scale, summed in rank order."""
    total = tl.zeros(at.shape, tl.float32)
    size = (length + 7) // 8
    for r in range(ranks):
        byte = tl.load(bits + r * size + at // 8, mask=valid, other=0).to(tl.int32)
        scale = tl.load(scales + r * count + segment, mask=valid, other=0.0)
        total += tl.where(((byte >> (at % 8).to(tl.int32)) & 1) != 0, scale, -scale)
    return tl.div_rn(total, tl.zeros(at.shape, tl.float32) + ranks)


@triton.jit
def _corrected(at, valid, segment, x, residual, bits, scales, ranks, count, length, MEAN: tl.constexpr):
    """c: the mean or x, plus the residual; 0 in the padding."""
    if MEAN:
        value = _mean(at, valid, segment, bits, scales, ranks, count, length)
    else:
        value = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    return value + tl.load(residual + at, mask=valid, other=0.0)


@triton.jit
def _pack(positive, tile, length, bits, TILE: tl.constexpr):
    """Packs ``positive``, [TILE], eight to a byte, the first in the lowest bit."""
    eights = tl.reshape(positive.to(tl.int32), (TILE // 8, 8)) << tl.arange(0, 8)[None, :]
    at = tile * (TILE // 8) + tl.arange(0, TILE // 8)
    tl.store(bits + at, tl.sum(eights, axis=1).to(tl.uint8), mask=at < (length + 7) // 8)


@triton.jit
def _subtract(at, c, valid, scale, residual, length):
    """residual = c − scale·sgn(c), 0 in the padding; unchanged where the scale is not finite."""
    left = tl.where(valid, c - tl.where(c >= 0, scale, -scale), 0.0)
    finite = scale - scale == 0
    tl.store(residual + at, left, mask=(at < length) & (finite | (valid == 0)))


@triton.jit
def _signs(
    x, residual, bits, scales, ranks, offsets, first, count, elements, length, out_bits, partial,
    TILE: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Packs a tile's signs, and writes Σ c² over its elements of segment j to partial[tile + j], which no other sum uses."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    valid = at < elements
    segment = _segment(at, offsets, first, tile)
    c = _corrected(at, valid, segment, x, residual, bits, scales, ranks, count, length, MEAN)
    _pack((c >= 0) | (valid == 0), tile, length, out_bits, TILE)
    wide = tl.where(valid, c, 0.0).to(tl.float64)
    for j in range(tl.load(first + tile), tl.load(first + tile + 1) + 1):
        tl.store(partial + tile + j, tl.sum(tl.where(segment == j, wide * wide, 0.0)))


@triton.jit
def _scales(partial, offsets, scales, TILE: tl.constexpr, STEP: tl.constexpr):
    """The scale of a segment: √(Σ of its sums / its elements)."""
    j = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + j)
    stop = tl.load(offsets + j + 1)
    last = (stop - 1) // TILE
    total = tl.zeros((STEP,), tl.float64)
    for tile in range(start // TILE, last + 1, STEP):
        at = tile + tl.arange(0, STEP)
        total += tl.load(partial + at + j, mask=at <= last, other=0.0)
    scale = tl.sqrt(tl.sum(total) / (stop - start).to(tl.float64)).to(tl.float32)
    tl.store(scales + j, tl.where(stop > start, scale, 0.0))


@triton.jit
def _residuals(
    x, residual, bits, scales, ranks, offsets, first, count, elements, length, out_scales,
    TILE: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    valid = at < elements
    segment = _segment(at, offsets, first, tile)
    c = _corrected(at, valid, segment, x, residual, bits, scales, ranks, count, length, MEAN)
    _subtract(at, c, valid, tl.load(out_scales + segment, mask=valid, other=0.0), residual, length)


@triton.jit
def _blocks(
    x, residual, bits, scales, ranks, count, elements, length, out_bits, out_scales,
    TILE: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Signs, scales and residuals in one pass, for blocks that divide a tile."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = segment[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = at < elements
    spread = segment[:, None] + tl.zeros_like(at)
    c = _corrected(at, valid, spread, x, residual, bits, scales, ranks, count, length, MEAN)
    _pack(tl.reshape((c >= 0) | (valid == 0), (TILE,)), tile, length, out_bits, TILE)
    wide = tl.where(valid, c, 0.0).to(tl.float64)
    filled = tl.minimum(tl.maximum(elements - segment * BLOCK, 0), BLOCK)
    scale = tl.sqrt(tl.sum(wide * wide, axis=1) / tl.maximum(filled, 1).to(tl.float64)).to(tl.float32)
    tl.store(out_scales + segment, scale, mask=segment < count)
    _subtract(at, c, valid, scale[:, None] + tl.zeros_like(c), residual, length)


@triton.jit
def _average(
    bits, scales, ranks, offsets, first, count, elements, length, out, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    valid = at < elements
    if BLOCK > 0:
        segment = at // BLOCK
    else:
        segment = _segment(at, offsets, first, tile)
    mean = _mean(at, valid, segment, bits, scales, ranks, count, length)
    tl.store(out + at, mean, mask=at < length)

"""Rotary position embedding by Triton kernels, over tiles of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows, tiles

TILE = {"ROWS": 32}

load: tiles.Loader = tiles.triton_name


def turn(x: torch.Tensor, both: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    x, y = x.contiguous(), rows.like(x)
    count, size = rows.sizes(x)
    positions, half = both.shape[1:]
    if count:
        options = {"INTERLEAVED": interleaved, "BACK": back, "PAIRS": triton.next_power_of_2(max(half, 1))}
        options |= {"REST": triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0}
        grid = (triton.cdiv(count, TILE["ROWS"]),)
        _turn[grid](x, both.contiguous(), y, count, size, positions, half, **options, **TILE, **tiles.EXACT)
    return y


@triton.jit
def _turn(
    x, both, y, rows, size, positions, half,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    valid = (row < rows) & (pair < half)
    angle = row % positions * half + pair
    cos = tl.load(both + angle, mask=valid, other=0.0)
    sin = tl.load(both + positions * half + angle, mask=valid, other=0.0)
    if BACK:
        sin = -sin
    first = row * size + (pair * 2 if INTERLEAVED else pair)
    second = first + (1 if INTERLEAVED else half)
    a = tl.load(x + first, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + first, (a * cos - b * sin).to(y.dtype.element_ty), mask=valid)
    tl.store(y + second, (a * sin + b * cos).to(y.dtype.element_ty), mask=valid)
    if REST:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (row < rows) & (column < size)
        tl.store(y + row * size + column, tl.load(x + row * size + column, mask=kept), mask=kept)

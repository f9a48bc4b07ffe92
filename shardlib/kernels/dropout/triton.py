"""Dropout from a counter by Triton kernels, over tiles of rows and columns; the bias's gradient over ranges of rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows, tiles
from shardlib.kernels.counter.triton import bits_of
from shardlib.kernels.dropout import DropoutDraw

TILE = {"ROWS": 16, "COLUMNS": 128}

load: tiles.Loader = tiles.triton_name


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: DropoutDraw
) -> torch.Tensor:
    x, y = x.contiguous(), rows.like(x)
    residual = None if residual is None else residual.contiguous()
    count, columns = rows.sizes(x)
    if count:
        grid = (triton.cdiv(count, TILE["ROWS"]), triton.cdiv(columns, TILE["COLUMNS"]))
        options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "STARTS": draw.starts is not None}
        drawn = _drawn(draw)
        _forward[grid](x, residual, bias, y, count, columns, *drawn, **options, **TILE, **tiles.EXACT)
    return y


def backward(bias: torch.Tensor | None, draw: DropoutDraw, dy: torch.Tensor) -> list[torch.Tensor]:
    dx = rows.like(dy)
    count, columns = rows.sizes(dy)
    each = tiles.rows_each(count, TILE["ROWS"])
    ranges = triton.cdiv(count, each)
    partial = torch.zeros(max(ranges, 1), dy.shape[-1], device=dy.device)
    if count:
        grid = (ranges, triton.cdiv(columns, TILE["COLUMNS"]))
        options = {"BIAS": bias is not None, "STARTS": draw.starts is not None}
        drawn = _drawn(draw)
        _backward[grid](dy, dx, partial, count, columns, each, *drawn, **options, **TILE, **tiles.EXACT)
    return [dx] if bias is None else [dx, partial.sum(0)]


def _drawn(draw: DropoutDraw) -> tuple[Any, ...]:
    """Scale, threshold, the seed's halves, start, starts."""
    seed = (draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF)
    starts = None if draw.starts is None else draw.starts.contiguous()
    return 1.0 / (1.0 - draw.p), int(draw.p * 2**24), *seed, draw.start, starts


@triton.jit
def _factor(
    row, column, rows, columns, scale, threshold, seed_low, seed_high, start, starts, STARTS: tl.constexpr
):  # fmt: skip
    """0 or scale, for rows [R, 1] and columns [1, C]."""
    if STARTS:
        index = tl.load(starts + row, mask=row < rows, other=0) + column
    else:
        index = start + row * columns + column
    return tl.where(bits_of(index, seed_low, seed_high).to(tl.int32) >= threshold, scale, 0.0)


@triton.jit
def _forward(
    x, residual, bias, y, rows, columns, scale, threshold, seed_low, seed_high, start, starts,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < rows) & (column < columns)
    at = row * columns + column
    z = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    z *= _factor(row, column, rows, columns, scale, threshold, seed_low, seed_high, start, starts, STARTS)
    if RESIDUAL:
        z += tl.load(residual + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + at, z.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _backward(
    dy, dx, partial, rows, columns, each, scale, threshold, seed_low, seed_high, start, starts,
    BIAS: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes rows i·each to (i + 1)·each of the j-th tile of columns."""
    row_range = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((1, COLUMNS), tl.float32)
    for first in range(0, each, ROWS):
        row = row_range * each + first + tl.arange(0, ROWS)[:, None]
        valid = (row < rows) & (column < columns)
        at = row * columns + column
        factor = _factor(row, column, rows, columns, scale, threshold, seed_low, seed_high, start, starts, STARTS)
        dz = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32) * factor
        tl.store(dx + at, dz.to(dx.dtype.element_ty), mask=valid)
        sums += tl.sum(dz, axis=0)[None, :]
    if BIAS:
        tl.store(partial + row_range * columns + column, sums, mask=column < columns)

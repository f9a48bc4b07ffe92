"""Bias + GeLU by Triton kernels, over tiles of rows and columns; the bias's gradient over ranges of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows, tiles

TILE = {"ROWS": 32, "COLUMNS": 128}

load: tiles.Loader = tiles.triton_name


def forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    x, y = x.contiguous(), rows.like(x)
    count, columns = rows.sizes(x)
    grid = (triton.cdiv(count, TILE["ROWS"]), triton.cdiv(columns, TILE["COLUMNS"]))
    if count:
        _forward[grid](x, bias, y, count, columns, BIAS=bias is not None, TANH=tanh, **TILE, **tiles.EXACT)
    return y


def backward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, dy: torch.Tensor) -> list[torch.Tensor]:
    x, dx = x.contiguous(), rows.like(x)
    count, columns = rows.sizes(x)
    ranges = triton.cdiv(count, tiles.rows_each(count, TILE["ROWS"]))
    partial = torch.zeros(max(ranges, 1), x.shape[-1], device=x.device)
    options = {"BIAS": bias is not None, "TANH": tanh, **TILE, **tiles.EXACT}
    if count:
        grid = (ranges, triton.cdiv(columns, TILE["COLUMNS"]))
        _backward[grid](x, bias, dy, dx, partial, count, columns, tiles.rows_each(count, TILE["ROWS"]), **options)
    return [dx] if bias is None else [dx, partial.sum(0)]


@triton.jit
def _normal(z):
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def _gate(z):
    """σ(2u) of the tanh approximation."""
    return tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def _forward(
    x, bias, y, rows, columns, BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < rows) & (column < columns)
    z = tl.load(x + row * columns + column, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    value = z * (_gate(z) if TANH else _normal(z))
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _backward(
    x, bias, dy, dx, partial, rows, columns, each,
    BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes rows i·each to (i + 1)·each of the j-th tile of columns."""
    row_range = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < columns
    shift = tl.zeros((1, COLUMNS), tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((1, COLUMNS), tl.float32)
    for start in range(0, each, ROWS):
        row = row_range * each + start + tl.arange(0, ROWS)[:, None]
        valid = (row < rows) & inside
        z = tl.load(x + row * columns + column, mask=valid, other=0.0).to(tl.float32) + shift
        if TANH:
            s = _gate(z)
            slope = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        else:
            slope = _normal(z) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
        dz = tl.load(dy + row * columns + column, mask=valid, other=0.0).to(tl.float32) * slope
        tl.store(dx + row * columns + column, dz.to(dx.dtype.element_ty), mask=valid)
        sums += tl.sum(dz, axis=0)[None, :]
    if BIAS:
        tl.store(partial + row_range * columns + column, sums, mask=inside)

"""SwiGLU by Triton kernels, over tiles of rows and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows, tiles

TILE = {"ROWS": 8, "COLUMNS": 256}

load: tiles.Loader = tiles.triton_name


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = rows.like(gate)
    count, columns = rows.sizes(gate)
    if count:
        _forward[_grid(count, columns)](
            *rows.strided(gate), *rows.strided(up), y, count, columns, **TILE, **tiles.EXACT
        )
    return y


def backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    gradients = [rows.like(gate), rows.like(gate)]
    count, columns = rows.sizes(gate)
    if count:
        inputs = (*rows.strided(gate), *rows.strided(up), dy)
        _backward[_grid(count, columns)](*inputs, *gradients, count, columns, **TILE, **tiles.EXACT)
    return gradients


def _grid(count: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(count, TILE["ROWS"]), triton.cdiv(columns, TILE["COLUMNS"])


@triton.jit
def _forward(gate, gate_stride, up, up_stride, y, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < rows) & (column < columns)
    g = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _backward(
    gate, gate_stride, up, up_stride, dy, dgate, dup, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < rows) & (column < columns)
    g = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    d = tl.load(dy + row * columns + column, mask=valid, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    at = row * columns + column
    tl.store(dgate + at, (d * u * s * (1.0 + g * (1.0 - s))).to(dgate.dtype.element_ty), mask=valid)
    tl.store(dup + at, (d * g * s).to(dup.dtype.element_ty), mask=valid)

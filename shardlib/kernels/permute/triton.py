"""Permutation of rows by Triton kernels: a program for each row that is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows as lines
from shardlib.kernels.common import tiles

WIDEST_BLOCK = 2048  # columns at once
STEP = 256  # assignments of a program

load: tiles.Loader = tiles.triton_name


def permute(x: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    out = x.new_empty(count, x.shape[1])
    _written(x, None, positions, None, out, None)
    return out


def unpermute(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    y = rows.new_empty(len(positions), rows.shape[1])
    if y.numel():
        rows, positions = rows.contiguous(), positions.contiguous()
        weights = None if weights is None else weights.contiguous()
        sizes = (len(rows), rows.shape[1], positions.shape[1])
        grid = (len(y), triton.cdiv(rows.shape[1], block_of(rows.shape[1])))
        options = {"WEIGHTED": weights is not None, "BLOCK": block_of(rows.shape[1])}
        _gather[grid](rows, positions, weights, y, *sizes, **options, **tiles.EXACT)
    return y


def backward(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    drows, dweights = lines.like(rows), torch.zeros(weights.shape, device=rows.device)
    _written(dy, rows.contiguous(), positions, weights.contiguous(), drows, dweights)
    return [drows, dweights]


def block_of(columns: int) -> int:
    return min(triton.next_power_of_2(max(columns, 1)), WIDEST_BLOCK)


def _written(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    dweights: torch.Tensor | None,
) -> None:
    """Writes ``out``, and the weights' gradients."""
    count, columns = out.shape
    size = positions.numel()
    if not size or not count:
        out.zero_()
        return
    assigned = torch.full((count,), -1, dtype=torch.int64, device=x.device)
    _invert[triton.cdiv(size, STEP),](positions.contiguous(), assigned, size, count, STEP=STEP)
    options = {"WEIGHTED": weights is not None, "BLOCK": block_of(columns)}
    k = positions.shape[1]
    _spread[count,](x.contiguous(), rows, assigned, weights, out, dweights, columns, k, **options, **tiles.EXACT)


@triton.jit
def _invert(positions, assigned, size, count, STEP: tl.constexpr):
    """The assignment of each row."""
    at = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    row = tl.load(positions + at, mask=at < size, other=-1)
    tl.store(assigned + row, at, mask=(row >= 0) & (row < count))


@triton.jit
def _spread(
    x, rows, assigned, weights, out, dweights, columns, k,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    a = tl.load(assigned + row)
    width = tl.where(a >= 0, columns, 0)  # of what is read
    if WEIGHTED:
        weight = tl.load(weights + tl.maximum(a, 0)).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + a // k * columns + column, mask=inside, other=0.0)
        if WEIGHTED:
            total += value.to(tl.float32) * tl.load(rows + row * columns + column, mask=inside, other=0.0).to(
                tl.float32
            )
            value = tl.where(inside, value.to(tl.float32) * weight, 0.0).to(out.dtype.element_ty)
        tl.store(out + row * columns + column, value, mask=column < columns)
    if WEIGHTED and a >= 0:
        tl.store(dweights + a, tl.sum(total, axis=0))


@triton.jit
def _gather(
    rows, positions, weights, y, count, columns, k,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        row = tl.load(positions + token * k + j)
        width = tl.where((row >= 0) & (row < count), columns, 0)
        term = tl.load(rows + row * columns + column, mask=column < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + token * k + j).to(tl.float32)
            term *= tl.where(width > 0, weight, 0.0)
        total += term
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=column < columns)

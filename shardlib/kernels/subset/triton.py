"""Tokens by their positions by Triton kernels: a program for each token that is written, and some of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles
from shardlib.kernels.subset import slots

WIDEST_BLOCK = 2048  # columns at once

load: tiles.Loader = tiles.triton_name


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(*index.shape, x.shape[2])
    if out.numel():
        sizes = (index.shape[1], x.shape[1], x.shape[2])
        _take[_grid(out)](x.contiguous(), index.contiguous(), out, *sizes, BLOCK=block_of(x.shape[2]), **tiles.EXACT)
    return out


def put(x: torch.Tensor | None, index: torch.Tensor, rows: torch.Tensor | None, length: int) -> torch.Tensor:
    given = rows if x is None else x
    assert given is not None
    out = given.new_empty(len(index), length, given.shape[2])
    if out.numel():
        x, rows = (None if each is None else each.contiguous() for each in (x, rows))
        options = {"KEEPS": x is not None, "PUTS": rows is not None, "BLOCK": block_of(given.shape[2])}
        sizes = (index.shape[1], length, given.shape[2])
        _put[_grid(out)](x, rows, slots(index, length), out, *sizes, **options, **tiles.EXACT)
    return out


def block_of(columns: int) -> int:
    return min(triton.next_power_of_2(max(columns, 1)), WIDEST_BLOCK)


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return out.shape[0] * out.shape[1], triton.cdiv(out.shape[2], block_of(out.shape[2]))


@triton.jit
def _take(x, index, out, taken, length, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row)
    width = tl.where((at >= 0) & (at < length), columns, 0)
    value = tl.load(x + (row // taken * length + at) * columns + column, mask=column < width, other=0.0)
    tl.store(out + row * columns + column, value, mask=column < columns)


@triton.jit
def _put(
    x, rows, slots, out, taken, length, columns,
    KEEPS: tl.constexpr, PUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    value = tl.zeros((BLOCK,), out.dtype.element_ty)
    if KEEPS:
        width = tl.where(slot < 0, columns, 0)
        value += tl.load(x + token * columns + column, mask=column < width, other=0.0)
    if PUTS:
        width = tl.where(slot < 0, 0, columns)
        value += tl.load(rows + (token // length * taken + slot) * columns + column, mask=column < width, other=0.0)
    tl.store(out + token * columns + column, value, mask=column < columns)

"""LayerNorm and RMSNorm by Triton kernels: a row is read once, into registers; in backward a program has several rows.

In backward a wide row, its gradient and the sums over its columns do not fit in the registers together: the row is read four
times, chunk by chunk, from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shardlib.common.thresholds import Threshold
from shardlib.kernels.common import rows, tiles
from shardlib.kernels.norm import Norm

CHUNK = 4096  # columns
WHOLE = 8192  # columns that fit in a program's registers in forward
WIDEST = 16384  # columns that the kernels take
_SUMS = Threshold(512)  # programs, each with a sum over rows; the sums are added afterwards


def load(device: torch.device) -> str:
    return f"{tiles.triton_name(device)}; LayerNorm without a sum, forward: torch"


def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight, bias, eps, centred = norm
    if centred and weight.dtype == x.dtype and x.is_cuda:  # torch's is as fast as memory
        return F.layer_norm(x.contiguous(), weight.shape, weight, None if bias is None else bias.to(x.dtype), eps)
    return _normed(x, None, norm)[0]


def forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
    return _normed(x, residual.contiguous(), norm)


def backward(total: torch.Tensor, norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor | None) -> list[torch.Tensor]:
    weight, bias, eps, centred = norm
    total, ds = total.contiguous(), rows.like(total)
    count, columns = rows.sizes(total)
    each = tiles.rows_each(count, 1, _SUMS)
    programs = triton.cdiv(count, each)
    partial = torch.zeros(2, max(programs, 1), total.shape[-1], device=total.device)
    if count:
        kernel = _backward if columns <= CHUNK else _backward_wide
        options = {"CENTRED": centred, "SUM": dtotal is not None, **_shape(min(columns, CHUNK)), **tiles.EXACT}
        kernel[(programs,)](total, weight.contiguous(), dy, dtotal, ds, *partial, count, columns, each, eps, **options)
    sums = list(partial.sum(1))
    return [ds, *(sums if bias is not None else sums[:1])]


def _normed(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> list[torch.Tensor]:
    weight, bias, eps, centred = norm
    x, y = x.contiguous(), rows.like(x)
    total = None if residual is None else rows.like(x)
    count, columns = rows.sizes(x)
    if count:
        options = {"CENTRED": centred, "SUM": residual is not None, "BIAS": bias is not None}
        vectors = (weight.contiguous(), None if bias is None else bias.contiguous())
        kernel, block = (_forward, columns) if columns <= WHOLE else (_forward_wide, CHUNK)
        kernel[(count,)](x, residual, *vectors, y, total, columns, eps, **options, **_shape(block), **tiles.EXACT)
    return [y] if total is None else [y, total]


def _shape(columns: int) -> dict[str, Any]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@triton.jit
def _statistics(s, inside, columns, eps, CENTRED: tl.constexpr):
    """s − μ, 0 beyond the row's end, and ρ."""
    if CENTRED:
        s = tl.where(inside, s - tl.sum(s, axis=0) / columns, 0.0)
    return s, 1.0 / tl.sqrt_rn(tl.sum(s * s, axis=0) / columns + eps)


@triton.jit
def _forward(
    x, residual, weight, bias, y, total, columns, eps,
    CENTRED: tl.constexpr, SUM: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    centred, scale = _statistics(s, inside, columns, eps, CENTRED)
    value = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of(s, row, columns, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        sums += tl.load(s + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    return tl.sum(sums, axis=0)


@triton.jit
def _wide_statistics(s, row, columns, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """μ and ρ of a row that is read by chunks."""
    mean = 0.0
    if CENTRED:
        mean = _sum_of(s, row, columns, BLOCK) / columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(s + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        squares += tl.where(column < columns, (value - mean) * (value - mean), 0.0)
    return mean, 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / columns + eps)


@triton.jit
def _forward_wide(
    x, residual, weight, bias, y, total, columns, eps,
    CENTRED: tl.constexpr, SUM: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_forward` for rows that do not fit in registers: they are read again, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    s = x
    if SUM:
        for first in range(0, columns, BLOCK):
            inside = first + lane < columns
            at = row * columns + first + lane
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # threads read below what other threads have written
        s = total
    mean, scale = _wide_statistics(s, row, columns, eps, CENTRED, BLOCK)
    for first in range(0, columns, BLOCK):
        column = first + lane
        inside = column < columns
        value = (tl.load(s + row * columns + column, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    total, weight, dy, dtotal, ds, dweight, dbias, rows, columns, each, eps,
    CENTRED: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i computes rows i·each to (i + 1)·each, and their sums for the gradients of weight and bias."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * each, tl.minimum((program + 1) * each, rows)):
        at = row * columns + column
        s = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        centred, scale = _statistics(s, inside, columns, eps, CENTRED)
        normed = centred * scale
        g = d * w
        grad = g - normed * (tl.sum(g * normed, axis=0) / columns)
        if CENTRED:
            grad -= tl.sum(g, axis=0) / columns
        grad *= scale
        if SUM:
            grad += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + at, grad.to(ds.dtype.element_ty), mask=inside)
        dw += d * normed
        db += d
    tl.store(dweight + program * columns + column, dw, mask=inside)
    tl.store(dbias + program * columns + column, db, mask=inside)


@triton.jit
def _backward_wide(
    total, weight, dy, dtotal, ds, dweight, dbias, rows, columns, each, eps,
    CENTRED: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_backward` for wide rows; the sums are in memory, which must be 0 at first."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for row in range(program * each, tl.minimum((program + 1) * each, rows)):
        mean, scale = _wide_statistics(total, row, columns, eps, CENTRED, BLOCK)
        means = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + lane
            inside = column < columns
            s = tl.load(total + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            g *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            means += g
            products += g * ((s - mean) * scale)
        product = tl.sum(products, axis=0) / columns
        shift = 0.0
        if CENTRED:
            shift = tl.sum(means, axis=0) / columns
        for first in range(0, columns, BLOCK):
            column = first + lane
            inside = column < columns
            at = row * columns + column
            d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            normed = (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
            g = d * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            grad = (g - shift - normed * product) * scale
            if SUM:
                grad += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(ds + at, grad.to(ds.dtype.element_ty), mask=inside)
            sums = program * columns + column
            tl.store(dweight + sums, tl.load(dweight + sums, mask=inside, other=0.0) + d * normed, mask=inside)
            tl.store(dbias + sums, tl.load(dbias + sums, mask=inside, other=0.0) + d, mask=inside)

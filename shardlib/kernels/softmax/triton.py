"""Masked softmax by Triton kernels: a row in registers, read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import rows, tiles

WIDEST = 16384  # columns that fit in registers

load: tiles.Loader = tiles.triton_name


def forward(x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    x, y = x.contiguous(), rows.like(x)
    count, keys = rows.sizes(x)
    if count:
        options = {"CAUSAL": causal, "LENGTHS": lengths is not None, **_shape(keys), **tiles.EXACT}
        lengths = None if lengths is None else lengths.contiguous()
        _forward[(count,)](x, y, lengths, x.shape[1] * x.shape[2], x.shape[2], keys, scale, **options)
    return y


def backward(y: torch.Tensor, causal: bool, scale: float, dy: torch.Tensor) -> torch.Tensor:
    y, dx = y.contiguous(), rows.like(y)
    count, keys = rows.sizes(y)
    if count:
        _backward[(count,)](y, dy, dx, y.shape[2], keys, scale, CAUSAL=causal, **_shape(keys), **tiles.EXACT)
    return dx


def _shape(keys: int) -> dict[str, Any]:
    block = triton.next_power_of_2(keys)
    return {"BLOCK": block, "num_warps": min(32, max(1, block // 512))}


@triton.jit
def _visible(row, queries, keys, CAUSAL: tl.constexpr):
    count = keys
    if CAUSAL:
        count = tl.minimum(row % queries + 1, keys).to(tl.int32)
    return count


@triton.jit
def _forward(
    x, y, lengths, per_sequence, queries, keys, scale,
    CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, BLOCK)
    count = _visible(row, queries, keys, CAUSAL)
    if LENGTHS:
        count = tl.minimum(count, tl.load(lengths + row // per_sequence).to(tl.int32))
    seen = key < count
    scores = tl.load(x + row * keys + key, mask=seen, other=0.0).to(tl.float32) * scale
    most = tl.max(tl.where(seen, scores, float("-inf")), axis=0)
    powers = tl.where(seen, tl.exp(scores - most), 0.0)
    total = tl.sum(powers, axis=0)
    value = tl.where(seen, powers / total, 0.0)
    tl.store(y + row * keys + key, value.to(y.dtype.element_ty), mask=key < keys)


@triton.jit
def _backward(y, dy, dx, queries, keys, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, BLOCK)
    seen = key < _visible(row, queries, keys, CAUSAL)
    at = row * keys + key
    p = tl.load(y + at, mask=seen, other=0.0).to(tl.float32)
    d = tl.load(dy + at, mask=seen, other=0.0).to(tl.float32)
    grad = p * (d - tl.sum(p * d, axis=0)) * scale
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=key < keys)

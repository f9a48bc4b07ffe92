"""AdamW, and Adam's direction, by Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.common import tiles

load: tiles.Loader = tiles.triton_name


@triton.jit
def _adamw(
    param, grad, mu, nu, copy, scale, count, b1, rest1, b2, rest2, decay, size, root, eps, TILE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    m = tl.load(mu + at, mask=valid, other=0.0).to(tl.float32) * b1 + g * rest1
    v = tl.load(nu + at, mask=valid, other=0.0).to(tl.float32) * b2 + g * g * rest2
    before = tl.load(param + at, mask=valid, other=0.0).to(tl.float32)
    p = before * decay - tl.div_rn(m * size, tl.sqrt_rn(v) * root + eps)
    tl.store(mu + at, m, mask=valid)
    tl.store(nu + at, v, mask=valid)
    tl.store(param + at, p, mask=valid)
    if copy is not None:
        tl.store(copy + at, p, mask=valid)


@triton.jit
def _direction(
    param, grad, mu, nu, scale, count, b1, rest1, b2, rest2, weight_decay, size, root, eps, TILE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    g = tl.load(grad + at, mask=valid, other=0.0)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    m = tl.load(mu + at, mask=valid, other=0.0) * b1 + g * rest1
    v = tl.load(nu + at, mask=valid, other=0.0) * b2 + g * g * rest2
    decay = tl.load(param + at, mask=valid, other=0.0) * weight_decay
    tl.store(mu + at, m, mask=valid)
    tl.store(nu + at, v, mask=valid)
    tl.store(grad + at, tl.div_rn(m * size, tl.sqrt_rn(v) * root + eps) + decay, mask=valid)


adamw_: tiles.Step = tiles.by(_adamw)
adam_direction_: tiles.Step = tiles.by(_direction)

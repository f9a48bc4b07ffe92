"""Adam's steps with a frozen variance by Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.common import tiles

load: tiles.Loader = tiles.triton_name


@triton.jit
def _momentum(at, valid, grad, mu, scale, b1, rest1):
    """β1·m + (1−β1)·g."""
    g = tl.load(grad + at, mask=valid, other=0.0)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    return tl.load(mu + at, mask=valid, other=0.0) * b1 + g * rest1


@triton.jit
def _masked(m, v):
    """m̄: m where v is not zero, else zero, or NaN if m is not finite."""
    return tl.where(v == 0, m - m, m)


@triton.jit
def _local_momentum(grad, mu, scale, count, b1, rest1, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    tl.store(grad + at, _momentum(at, valid, grad, mu, scale, b1, rest1), mask=valid)


@triton.jit
def _frozen_step(param, mu, nu, copy, count, size, eps, weight_decay, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    v = tl.load(nu + at, mask=valid, other=0.0)
    m = _masked(tl.load(mu + at, mask=valid, other=0.0), v)
    p = tl.load(param + at, mask=valid, other=0.0)
    p += (tl.div_rn(m, tl.sqrt_rn(v) + eps) + p * weight_decay) * size
    tl.store(mu + at, m, mask=valid)
    tl.store(param + at, p, mask=valid)
    if copy is not None:
        tl.store(copy + at, p, mask=valid)


@triton.jit
def _local_step(grad, mu, nu, moved, scale, count, size, b1, rest1, eps, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    v = tl.load(nu + at, mask=valid, other=0.0)
    m = _masked(_momentum(at, valid, grad, mu, scale, b1, rest1), v)
    u = tl.load(moved + at, mask=valid, other=0.0) + tl.div_rn(m, tl.sqrt_rn(v) + eps) * size
    tl.store(mu + at, m, mask=valid)
    tl.store(moved + at, u, mask=valid)


@triton.jit
def _fresh_step(mu, before, nu, fresh, spread, count, b1, rest1, b2, rest2, eps, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    v = tl.load(nu + at, mask=valid, other=0.0)
    zero = tl.zeros_like(v)
    m = tl.div_rn(tl.load(mu + at, mask=valid, other=0.0), zero + tl.load(spread).to(tl.float32))
    m = _masked(m, v)
    g = tl.div_rn(m - tl.load(before + at, mask=valid, other=0.0) * b1, zero + rest1)
    f = tl.load(fresh + at, mask=valid, other=0.0) * b2 + g * g * rest2
    tl.store(mu + at, m, mask=valid)
    tl.store(fresh + at, f, mask=valid)
    tl.store(before + at, tl.div_rn(m, tl.sqrt_rn(v) + eps), mask=valid)


local_momentum_: tiles.Step = tiles.by(_local_momentum)
frozen_step_: tiles.Step = tiles.by(_frozen_step)
local_step_: tiles.Step = tiles.by(_local_step)
fresh_step_: tiles.Step = tiles.by(_fresh_step)

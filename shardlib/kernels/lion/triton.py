"""Lion by a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.common import tiles

load: tiles.Loader = tiles.triton_name


@triton.jit
def _lion(param, grad, mu, copy, scale, count, b1, rest1, b2, rest2, decay, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = at < count
    g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    m = tl.load(mu + at, mask=valid, other=0.0).to(tl.float32)
    c = m * b1 + g * rest1
    by = tl.where(c > 0, size, tl.where(c < 0, -size, c - c))  # NaN stays
    p = tl.load(param + at, mask=valid, other=0.0).to(tl.float32) * decay - by
    tl.store(mu + at, m * b2 + g * rest2, mask=valid)
    tl.store(param + at, p, mask=valid)
    if copy is not None:
        tl.store(copy + at, p, mask=valid)


lion_: tiles.Step = tiles.by(_lion)

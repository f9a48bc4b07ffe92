"""AdamW with moments in 8 bits, by a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.adamw8 import BLOCK, SIGNED, UNSIGNED, CodedStep
from shardlib.kernels.common import tiles

BLOCKS = 4  # of a program
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer
_NORMAL = tl.constexpr(2.0**-126)

load: tiles.Loader = tiles.triton_name


def adamw8_(step: CodedStep) -> None:
    *buffers, factors, scale = step
    count = step.param.numel()
    lines = (SIGNED.lines(step.param.device), UNSIGNED.lines(step.param.device))
    grid = (triton.cdiv(count, BLOCKS * BLOCK),)
    _adamw8[grid](*buffers, *lines, scale, count, *factors, BLOCKS=BLOCKS, BLOCK=BLOCK, **tiles.EXACT)


@triton.jit
def _decode(codes, scales, lines, BITS: tl.constexpr):
    c = (codes & ((1 << BITS) - 1)).to(tl.float32)
    fraction = c * tl.load(lines + 2) + tl.load(lines + 3)
    for e in tl.static_range(1, BITS):
        fraction = tl.maximum(fraction, c * tl.load(lines + 4 * e + 2) + tl.load(lines + 4 * e + 3))
    if BITS == 7:
        fraction = (fraction.to(tl.int32, bitcast=True) | ((codes & 128) << 24)).to(tl.float32, bitcast=True)
    return fraction * scales[:, None]


@triton.jit
def _encode(values, lines, BITS: tl.constexpr):
    """The codes of ``values``, and the scales of its rows."""
    # Magnitudes are compared as integers, which order like the floats with infinity and then NaN on top.
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scales = tl.where(most < _NORMAL, 0.0, most)
    finite = scales - scales == 0
    values = tl.where(finite[:, None], values, 0.0)
    usable = finite & (scales > 0)
    ones = tl.zeros_like(scales) + 1.0
    reciprocals = tl.where(usable, tl.div_rn(ones, tl.where(usable, scales, 1.0)), 0.0)
    fractions = tl.abs(values) * reciprocals[:, None]
    height = fractions * tl.load(lines) + tl.load(lines + 1)
    for e in tl.static_range(1, BITS):
        height = tl.minimum(height, fractions * tl.load(lines + 4 * e) + tl.load(lines + 4 * e + 1))
    codes = ((height + _ROUND) - _ROUND).to(tl.int32)
    if BITS == 8:
        codes = tl.where((fractions > 0) & (codes == 0), 1, codes)
    else:
        codes |= (values.to(tl.int32, bitcast=True) >> 24) & 128
    return codes, scales


@triton.jit
def _adamw8(
    param, grad, mu, mu_scales, nu, nu_scales, copy, signed_lines, unsigned_lines, scale, count,
    b1, rest1, b2, rest2, decay, size, root, eps, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid, here = at < count, block * BLOCK < count
    g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    old = tl.load(mu + at, mask=valid, other=0).to(tl.int32)
    m = _decode(old, tl.load(mu_scales + block, mask=here, other=0.0), signed_lines, 7) * b1 + g * rest1
    old = tl.load(nu + at, mask=valid, other=0).to(tl.int32)
    v = _decode(old, tl.load(nu_scales + block, mask=here, other=0.0), unsigned_lines, 8) * b2 + g * g * rest2
    before = tl.load(param + at, mask=valid, other=0.0).to(tl.float32)
    p = before * decay - tl.div_rn(m * size, tl.sqrt_rn(v) * root + eps)
    tl.store(param + at, p, mask=valid)
    if copy is not None:
        tl.store(copy + at, p, mask=valid)
    codes, scales = _encode(m, signed_lines, 7)
    tl.store(mu + at, codes.to(tl.uint8), mask=valid)
    tl.store(mu_scales + block, scales, mask=here)
    codes, scales = _encode(v, unsigned_lines, 8)
    tl.store(nu + at, codes.to(tl.uint8), mask=valid)
    tl.store(nu_scales + block, scales, mask=here)

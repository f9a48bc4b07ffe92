"""Functions that the Triton kernels of block-sparse attention share: a program's rows, products, logits and dropout."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.counter.triton import mix

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def entry_of(table, count, fields: tl.constexpr, heads, SHARED: tl.constexpr):
    """This program's sample, head and row of a table of items or merges. ``SHARED``: all heads share one table."""
    program = tl.program_id(0)
    entry = table + (program % count) * fields
    batch = program // count
    head = tl.load(entry)
    if SHARED:
        head = batch % heads
        batch = batch // heads
    return batch, head, entry


@triton.jit
def slot_of(slot, slots, count):
    """The index of this program's partial result."""
    return (tl.program_id(0) // count).to(tl.int64) * slots + slot


@triton.jit
def tile_rows(members, tile, size, ROWS: tl.constexpr, CELL: tl.constexpr):
    """Positions of a tile's rows, and each row's bit, 0 beyond the end."""
    r = tl.arange(0, ROWS * CELL)
    at = tl.load(members + tile * ROWS + r // CELL) * CELL + r % CELL
    return at, tl.where(at < size, 1 << (r // CELL), 0)


@triton.jit
def step_rows(blocks, bits, step, WIDTH: tl.constexpr, CELL: tl.constexpr):
    """Positions of a step's rows, and the bits of the tile's lists that hold them. CELL is a power of two.

    An "or" adds: of the sum of a number that is loaded ahead and r % CELL, Triton 3.6 takes every element for a multiple of
    CELL, and then compares positions once for 16 rows, which is wrong next to the diagonal.
    """
    r = tl.arange(0, WIDTH * CELL)
    offset = step * WIDTH + r // CELL
    return tl.load(blocks + offset) * CELL | r % CELL, tl.load(bits + offset)


@triton.jit
def load_rows(base, at, valid, D: tl.constexpr, HEAD: tl.constexpr, WHOLE: tl.constexpr):
    """Rows ``at`` of ``[rows, D]``, as ``[len(at), HEAD]``."""
    return load_chunk(base, at, valid, tl.arange(0, HEAD), D, HEAD, WHOLE)


@triton.jit
def load_chunk(base, at, valid, d, D: tl.constexpr, HEAD: tl.constexpr, WHOLE: tl.constexpr):
    """The columns ``d`` of rows ``at``, 0 beyond D and where not ``valid``. ``WHOLE``: all rows are valid."""
    x = base + at[:, None] * D + d[None, :]
    if WHOLE and D == HEAD:
        rows = tl.load(x)
    elif WHOLE:
        rows = tl.load(x, mask=(d < D)[None, :], other=0.0)
    else:
        rows = tl.load(x, mask=(d < D)[None, :] & valid[:, None], other=0.0)
    return rows


@triton.jit
def products(
    held, x, at_x, valid_x, y, at_y, valid_y, D: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[at_x] · y[at_y]ᵀ. If CHUNK is HEAD, registers hold all of x[at_x], which the caller passes as ``held``."""
    if CHUNK == HEAD:
        rows_y = load_rows(y, at_y, valid_y, D, HEAD, WHOLE).to(TYPE)
        total = tl.dot(held, tl.trans(rows_y), input_precision=PRECISION)
    else:
        total = tl.zeros((at_x.shape[0], at_y.shape[0]), tl.float32)
        for first in range(0, HEAD, CHUNK):
            d = first + tl.arange(0, CHUNK)
            rows_x = load_chunk(x, at_x, valid_x, d, D, HEAD, False).to(TYPE)
            rows_y = load_chunk(y, at_y, valid_y, d, D, HEAD, WHOLE).to(TYPE)
            total = tl.dot(rows_x, tl.trans(rows_y), total, input_precision=PRECISION)
    return total


@triton.jit
def store_rows(base, at, valid, rows, D: tl.constexpr, HEAD: tl.constexpr):
    d = tl.arange(0, HEAD)[None, :]
    tl.store(base + at[:, None] * D + d, rows.to(base.dtype.element_ty), mask=(d < D) & valid[:, None])


@triton.jit
def seen(used, j, key_mask, batch, size, WHOLE: tl.constexpr):
    """``used``, the bits of keys ``j``, set to 0 for keys beyond the end and for masked keys."""
    if not WHOLE:
        used = tl.where(j < size, used, 0)
    if key_mask is not None:
        used = tl.where(tl.load(key_mask + batch.to(tl.int64) * size + j, mask=j < size, other=0) != 0, used, 0)
    return used


@triton.jit
def logits(product, i, j, used, bias, scale, size, CAUSAL: tl.constexpr):
    """The logits of queries i and keys j, to base 2; −∞ where not ``used``. Shapes broadcast to that of ``product``."""
    s = product * (scale * LOG2E)
    if CAUSAL:
        used = used & (i >= j)
    if bias is not None:
        s += tl.load(bias + (j - i + (size - 1)), mask=used, other=0.0) * LOG2E
    return tl.where(used, s, float("-inf"))


@triton.jit
def probabilities(s, lse):
    """2^(s − lse · log₂e); 0 in rows without a key, whose lse is −∞."""
    return tl.exp2(s - tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))


@triton.jit
def kept(first, j, seed_low, seed_high, least):
    """Whether dropout keeps each element ``first`` + j, by the random bits of `shardlib.rng`."""
    seed_low = seed_low.to(tl.uint32, bitcast=True)
    seed_high = seed_high.to(tl.uint32, bitcast=True)
    high = (first >> 32).to(tl.uint32)
    start = first.to(tl.uint32)
    low = start + j.to(tl.uint32)
    # Along a row the upper half changes only by a carry: two mixes per row, not one per element.
    upper = tl.where(low < start, mix((high + 1) ^ seed_high), mix(high ^ seed_high))
    return (mix(mix(low ^ seed_low) ^ upper) >> 8) >= least.to(tl.uint32)

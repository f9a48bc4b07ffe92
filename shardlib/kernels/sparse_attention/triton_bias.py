"""The gradient of a relative position bias: scores' gradients summed along diagonals, in the same order in every run."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.sparse_attention.triton_inner import (
    entry_of,
    kept,
    load_chunk,
    logits,
    probabilities,
    seen,
    slot_of,
    step_rows,
)


@triton.jit(do_not_specialize=["counter", "seed_low", "seed_high", "least"])
def by_diagonal(
    q, k, v, key_mask, bias, dout, lse, delta, sums, partial,
    members, blocks, bits, items, count, slots, heads, group, size, bias_stride, scale,
    counter, seed_low, seed_high, least, kept_scale, cells,
    D: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Sums over a diagonal, WIDTH cells at a time: 2 · CELL sums, the x-th where key − query = x − (CELL − 1) in a cell."""
    batch, head, item = entry_of(items, count, 5, heads, SHARED)
    diagonal = tl.load(members + tl.load(item + 1))
    row = (batch * heads + head).to(tl.int64) * size
    keys = (batch * (heads // group) + head // group).to(tl.int64) * size * D
    bias += head * bias_stride
    total = tl.zeros((CELL, CELL), tl.float32)
    for step in range(tl.load(item + 2), tl.load(item + 3)):
        i, valid = step_rows(blocks, bits, step, WIDTH, CELL)
        j = i + (diagonal - (cells - 1)) * CELL
        used = seen(valid, j, key_mask, batch, size, False)
        valid = tl.where(i < size, valid, 0)
        totals = tl.load(lse + row + i, mask=valid != 0, other=float("-inf"))
        inners = tl.load(delta + row + i, mask=valid != 0, other=0.0)
        both = (tl.reshape(valid, (WIDTH, CELL, 1)) != 0) & (tl.reshape(used, (WIDTH, 1, CELL)) != 0)
        rows, columns = tl.reshape(i, (WIDTH, CELL, 1)), tl.reshape(j, (WIDTH, 1, CELL))
        product = _products(
            q + row * D, i, valid != 0, k + keys, j, used != 0, D, HEAD, CHUNK, WIDTH, CELL, TYPE, PRECISION
        )
        s = logits(product, rows, columns, both, bias, scale, size, CAUSAL)
        p = probabilities(s, tl.reshape(totals, (WIDTH, CELL, 1)))
        dp = _products(
            dout + row * D, i, valid != 0, v + keys, j, used != 0, D, HEAD, CHUNK, WIDTH, CELL, TYPE, PRECISION
        )
        if DROPOUT:
            keep = kept(counter + (row + rows) * size, columns, seed_low, seed_high, least)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        total += tl.sum(p * (dp - tl.reshape(inners, (WIDTH, CELL, 1))), axis=0)
    # Every row is shifted so that key − query is the same in a whole column.
    x = tl.arange(0, 2 * CELL)
    column = tl.arange(0, CELL)[:, None] + x[None, :] - (CELL - 1)
    inside = (column >= 0) & (column < CELL)
    along = tl.sum(tl.where(inside, tl.gather(total, tl.where(inside, column, 0), 1), 0.0), axis=0)
    slot = tl.load(item + 4)
    if slot < 0:
        offset = (batch * heads + head).to(tl.int64) * (2 * cells - 1) + diagonal
        tl.store(sums + offset * (2 * CELL) + x, along)
    else:
        tl.store(partial + slot_of(slot, slots, count) * (2 * CELL) + x, along)


@triton.jit
def _products(
    x, at_x, valid_x, y, at_y, valid_y, D: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, CELL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of each cell's rows of x and y, [WIDTH, CELL, CELL]."""
    total = tl.zeros((WIDTH, CELL, CELL), tl.float32)
    for first in range(0, HEAD, CHUNK):
        d = first + tl.arange(0, CHUNK)
        rows_x = tl.reshape(load_chunk(x, at_x, valid_x, d, D, HEAD, False).to(TYPE), (WIDTH, CELL, CHUNK))
        rows_y = tl.reshape(load_chunk(y, at_y, valid_y, d, D, HEAD, False).to(TYPE), (WIDTH, CELL, CHUNK))
        total = tl.dot(rows_x, tl.permute(rows_y, (0, 2, 1)), total, input_precision=PRECISION)
    return total

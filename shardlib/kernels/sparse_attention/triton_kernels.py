"""The Triton kernels of block-sparse attention.

Forward: tiles of queries over their key blocks with an online softmax, and the merge of partial results. Backward: dQ by
tiles of queries, dK and dV by tiles of keys, the bias's gradient along diagonals, and sums of partial results in order. No
two programs add to the same address, so the gradients are the same in every run.
"""

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


# Forward.


@triton.jit(do_not_specialize=["counter", "seed_low", "seed_high", "least"])
def attend(
    q, k, v, key_mask, bias, out, lse, partial, partial_lse,
    members, blocks, bits, items, count, slots, heads, group, size, bias_stride, scale,
    counter, seed_low, seed_high, least, kept_scale,
    D: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Attention of one item. The result of a row without a key is 0, its log-sum-exp −∞."""
    batch, head, item = entry_of(items, count, 5, heads, SHARED)
    slot = tl.load(item + 4)
    i, bit = tile_rows(members, tl.load(item + 1), size, ROWS, CELL)
    row = (batch * heads + head).to(tl.int64) * size
    keys = (batch * (heads // group) + head // group).to(tl.int64) * size * D
    queries = load_rows(q + row * D, i, bit != 0, D, HEAD, False).to(TYPE)
    if bias is not None:
        bias += head * bias_stride
    top = tl.full((ROWS * CELL,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * CELL,), tl.float32)
    mean = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    for step in range(tl.load(item + 2), tl.load(item + 3)):
        j, used = step_rows(blocks, bits, step, WIDTH, CELL)
        used = seen(used, j, key_mask, batch, size, WHOLE)
        product = products(
            queries, q + row * D, i, bit != 0, k + keys, j, j < size, D, HEAD, CHUNK, WHOLE, TYPE, PRECISION
        )
        s = logits(product, i[:, None], j[None, :], (bit[:, None] & used[None, :]) != 0, bias, scale, size, CAUSAL)
        higher = tl.maximum(top, tl.max(s, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # −∞ − (−∞) would be NaN
        p = tl.exp2(s - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, axis=1)
        if DROPOUT:
            p = tl.where(kept((counter + (row + i) * size)[:, None], j[None, :], seed_low, seed_high, least), p, 0.0)
        values = load_rows(v + keys, j, j < size, D, HEAD, WHOLE).to(TYPE)
        mean = tl.dot(p.to(TYPE), values, mean * shrink[:, None], input_precision=PRECISION)
        top = higher
    none = total == 0
    mean *= (kept_scale / tl.where(none, 1.0, total))[:, None]
    log = tl.where(none, float("-inf"), (top + tl.log2(tl.where(none, 1.0, total))) / LOG2E)
    if slot < 0:
        store_rows(out + row * D, i, bit != 0, mean, D, HEAD)
        tl.store(lse + row + i, log, mask=bit != 0)
    else:
        r = tl.arange(0, ROWS * CELL)
        offset = slot_of(slot, slots, count) * (ROWS * CELL)
        store_rows(partial + offset * HEAD, r, r >= 0, mean, HEAD, HEAD)
        tl.store(partial_lse + offset + r, log)


@triton.jit
def merge(
    partial, partial_lse, out, lse, members, merges, count, slots, heads, size,
    D: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, CELL: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Merges means over subsets of a row's keys into the mean over all keys, weighted by each subset's sum."""
    r = tl.arange(0, ROWS * CELL)
    batch, head, entry = entry_of(merges, count, 4, heads, SHARED)
    top = tl.full((ROWS * CELL,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * CELL,), tl.float32)
    mean = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    for slot in range(tl.load(entry + 2), tl.load(entry + 3)):
        offset = slot_of(slot, slots, count) * (ROWS * CELL)
        log = tl.load(partial_lse + offset + r) * LOG2E
        higher = tl.maximum(top, log)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(log - finite)
        shrink = tl.exp2(top - finite)
        total = total * shrink + weight
        mean = mean * shrink[:, None] + weight[:, None] * load_rows(
            partial + offset * HEAD, r, r >= 0, HEAD, HEAD, True
        )
        top = higher
    none = total == 0
    i, bit = tile_rows(members, tl.load(entry + 1), size, ROWS, CELL)
    row = (batch * heads + head).to(tl.int64) * size
    store_rows(out + row * D, i, bit != 0, mean / tl.where(none, 1.0, total)[:, None], D, HEAD)
    log = tl.where(none, float("-inf"), (top + tl.log2(tl.where(none, 1.0, total))) / LOG2E)
    tl.store(lse + row + i, log, mask=bit != 0)


# Backward.


@triton.jit
def inner(dout, out, delta, rows, D: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr):
    """delta = Σ_d dout · out of every row, which equals Σ_j p_ij dp_ij, with dropout too."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = row < rows
    product = load_rows(dout, row, valid, D, HEAD, False).to(tl.float32)
    product *= load_rows(out, row, valid, D, HEAD, False).to(tl.float32)
    tl.store(delta + row, tl.sum(product, axis=1), mask=valid)


@triton.jit(do_not_specialize=["counter", "seed_low", "seed_high", "least"])
def by_query(
    q, k, v, key_mask, bias, dout, lse, delta, dq, partial,
    members, blocks, bits, items, count, slots, heads, group, size, bias_stride, scale,
    counter, seed_low, seed_high, least, kept_scale,
    D: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    batch, head, item = entry_of(items, count, 5, heads, SHARED)
    i, bit = tile_rows(members, tl.load(item + 1), size, ROWS, CELL)
    row = (batch * heads + head).to(tl.int64) * size
    keys = (batch * (heads // group) + head // group).to(tl.int64) * size * D
    queries = load_rows(q + row * D, i, bit != 0, D, HEAD, False).to(TYPE)
    grads = load_rows(dout + row * D, i, bit != 0, D, HEAD, False).to(TYPE)
    totals = tl.load(lse + row + i, mask=bit != 0, other=float("-inf"))
    inners = tl.load(delta + row + i, mask=bit != 0, other=0.0)
    if bias is not None:
        bias += head * bias_stride
    result = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    for step in range(tl.load(item + 2), tl.load(item + 3)):
        j, used = step_rows(blocks, bits, step, WIDTH, CELL)
        used = seen(used, j, key_mask, batch, size, WHOLE)
        product = products(
            queries, q + row * D, i, bit != 0, k + keys, j, j < size, D, HEAD, CHUNK, WHOLE, TYPE, PRECISION
        )
        s = logits(product, i[:, None], j[None, :], (bit[:, None] & used[None, :]) != 0, bias, scale, size, CAUSAL)
        p = probabilities(s, totals[:, None])
        dp = products(grads, dout + row * D, i, bit != 0, v + keys, j, j < size, D, HEAD, CHUNK, WHOLE, TYPE, PRECISION)
        if DROPOUT:
            first = counter + (row + i) * size
            dp = tl.where(kept(first[:, None], j[None, :], seed_low, seed_high, least), dp * kept_scale, 0.0)
        ds = p * (dp - inners[:, None])
        key_rows = load_rows(k + keys, j, j < size, D, HEAD, WHOLE).to(TYPE)
        result = tl.dot(ds.to(TYPE), key_rows, result, input_precision=PRECISION)
    result *= scale
    slot = tl.load(item + 4)
    if slot < 0:
        store_rows(dq + row * D, i, bit != 0, result, D, HEAD)
    else:
        r = tl.arange(0, ROWS * CELL)
        offset = slot_of(slot, slots, count) * (ROWS * CELL * HEAD)
        store_rows(partial + offset, r, r >= 0, result, HEAD, HEAD)


@triton.jit(do_not_specialize=["counter", "seed_low", "seed_high", "least"])
def by_key(
    q, k, v, key_mask, bias, dout, lse, delta, dk, dv, partial_k, partial_v,
    members, blocks, bits, items, count, slots, heads, group, size, bias_stride, scale,
    counter, seed_low, seed_high, least, kept_scale, cells,
    D: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dK and dV of an item. A step's rows are queries of the ``group`` heads that share a key head, ``cells`` · CELL each."""
    batch, head, item = entry_of(items, count, 5, heads, SHARED)
    j, bit = tile_rows(members, tl.load(item + 1), size, ROWS, CELL)
    row = (batch * heads + head).to(tl.int64) * size
    if key_mask is not None:
        bit = tl.where(tl.load(key_mask + batch.to(tl.int64) * size + j, mask=j < size, other=0) != 0, bit, 0)
    keys = load_rows(k + row * D, j, j < size, D, HEAD, False).to(TYPE)
    values = load_rows(v + row * D, j, j < size, D, HEAD, False).to(TYPE)
    first_row = row * group
    if bias is not None:
        bias += head * group * bias_stride
    result_k = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    result_v = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    for step in range(tl.load(item + 2), tl.load(item + 3)):
        offset, used = step_rows(blocks, bits, step, WIDTH, CELL)
        member = offset // (cells * CELL)
        i = offset - member * (cells * CELL)
        if not WHOLE:
            used = tl.where(i < size, used, 0)
        at = member * size + i
        totals = tl.load(lse + first_row + at, mask=i < size, other=float("-inf"))
        inners = tl.load(delta + first_row + at, mask=i < size, other=0.0)
        product = products(
            keys, k + row * D, j, j < size, q + first_row * D, at, i < size, D, HEAD, CHUNK, WHOLE, TYPE, PRECISION
        )
        member_bias = bias
        if bias is not None:
            member_bias = bias + (member * bias_stride)[None, :]
        s = logits(
            product, i[None, :], j[:, None], (bit[:, None] & used[None, :]) != 0, member_bias, scale, size, CAUSAL
        )
        p = probabilities(s, totals[None, :])
        dp = products(
            values, v + row * D, j, j < size, dout + first_row * D, at, i < size, D, HEAD, CHUNK, WHOLE, TYPE, PRECISION
        )
        weights = p
        if DROPOUT:
            first = counter + (first_row + at) * size
            keep = kept(first[None, :], j[:, None], seed_low, seed_high, least)
            weights = tl.where(keep, p * kept_scale, 0.0)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        grads = load_rows(dout + first_row * D, at, i < size, D, HEAD, WHOLE).to(TYPE)
        result_v = tl.dot(weights.to(TYPE), grads, result_v, input_precision=PRECISION)
        ds = p * (dp - inners[None, :])
        queries = load_rows(q + first_row * D, at, i < size, D, HEAD, WHOLE).to(TYPE)
        result_k = tl.dot(ds.to(TYPE), queries, result_k, input_precision=PRECISION)
    result_k *= scale
    slot = tl.load(item + 4)
    if slot < 0:
        store_rows(dk + row * D, j, j < size, result_k, D, HEAD)
        store_rows(dv + row * D, j, j < size, result_v, D, HEAD)
    else:
        r = tl.arange(0, ROWS * CELL)
        offset = slot_of(slot, slots, count) * (ROWS * CELL * HEAD)
        store_rows(partial_k + offset, r, r >= 0, result_k, HEAD, HEAD)
        store_rows(partial_v + offset, r, r >= 0, result_v, HEAD, HEAD)


@triton.jit
def add(
    partial, result, members, merges, count, slots, heads, size,
    D: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, CELL: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Adds a tile's partial sums, in the order of their slots."""
    r = tl.arange(0, ROWS * CELL)
    batch, head, entry = entry_of(merges, count, 4, heads, SHARED)
    total = tl.zeros((ROWS * CELL, HEAD), tl.float32)
    for slot in range(tl.load(entry + 2), tl.load(entry + 3)):
        offset = slot_of(slot, slots, count) * (ROWS * CELL * HEAD)
        total += load_rows(partial + offset, r, r >= 0, HEAD, HEAD, True)
    at, bit = tile_rows(members, tl.load(entry + 1), size, ROWS, CELL)
    store_rows(result + (batch * heads + head).to(tl.int64) * size * D, at, bit != 0, total, D, HEAD)


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

"""Forward kernels: tiles of queries over their key blocks with an online softmax, and the merge of partial results."""

from __future__ import annotations

import triton
import triton.language as tl

from shardlib.kernels.sparse_attention.triton_inner import (
    LOG2E,
    entry_of,
    kept,
    load_rows,
    logits,
    products,
    seen,
    slot_of,
    step_rows,
    store_rows,
    tile_rows,
)


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

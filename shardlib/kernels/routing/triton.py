"""Routing by Triton kernels: the best of tiles of tokens, then two passes over tiles of assignments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles

WIDEST = 1024  # experts
ROWS = 16  # tokens of a program, at up to 128 experts
STEP = 32  # assignments that are placed at once, at up to 64 experts
EACH = 512  # assignments of a program

load: tiles.Loader = tiles.triton_name


def top_k(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
    tokens, count = scores.shape
    experts = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    if tokens:
        shape = top_shape_of(count)
        _best[triton.cdiv(tokens, shape["ROWS"]),](scores.contiguous(), experts, tokens, count, k, **shape)
    return [experts, *by_expert(experts, count)]


def by_expert(experts: torch.Tensor, count: int) -> list[torch.Tensor]:
    experts = experts.contiguous()
    positions, size = torch.empty_like(experts), experts.numel()
    programs = triton.cdiv(size, EACH)
    first = experts.new_zeros(count, max(programs, 1))
    options = sort_shape_of(count)
    if size:
        _count[programs,](experts, first, size, count, programs, **options)
    ends = first.view(-1).cumsum(0).view(first.shape)
    counts = first.sum(1)
    if size:
        _place[programs,](experts, ends - first, positions, size, count, programs, **options)
    return [counts, positions]


def top_shape_of(count: int) -> dict[str, int]:
    """The tile of `_best`."""
    block = triton.next_power_of_2(count)
    return {"BLOCK": block, "ROWS": max(1, min(ROWS, ROWS * 128 // block))}


def sort_shape_of(count: int) -> dict[str, int]:
    """The tiles of `_count` and `_place`."""
    block = triton.next_power_of_2(count)
    return {"BLOCK": block, "STEP": max(1, min(STEP, STEP * 64 // block)), "EACH": EACH}


@triton.jit
def _best(scores, experts, tokens, count, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each score as a number that orders them, above the number that puts the lower index first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (column < count)
    score = tl.load(scores + row * count + column, mask=inside, other=0.0).to(tl.float32)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(score != score, 0x7FFFFFFF, rank).to(tl.int64)
    key = tl.where(column < count, rank * BLOCK + (BLOCK - 1 - column), -0x7FFFFFFFFFFFFFFF)
    for j in range(k):
        most = tl.max(key, axis=1)[:, None]
        expert = tl.sum(tl.where(key == most, column, 0), axis=1)[:, None]
        tl.store(experts + row * k + j, expert.to(tl.int64), mask=row < tokens)
        key = tl.where(key == most, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def _count(experts, first, size, count, programs, BLOCK: tl.constexpr, STEP: tl.constexpr, EACH: tl.constexpr):
    """The counts of program i, in column i of ``first``."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, EACH, STEP):
        at = program.to(tl.int64) * EACH + start + tl.arange(0, STEP)
        expert = tl.load(experts + at, mask=at < size, other=-1)
        total += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(first + column * programs + program, total.to(tl.int64), mask=column < count)


@triton.jit
def _place(
    experts, first, positions, size, count, programs, BLOCK: tl.constexpr, STEP: tl.constexpr, EACH: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    next_ = tl.load(first + column * programs + program, mask=column < count, other=0)
    for start in range(0, EACH, STEP):
        at = program.to(tl.int64) * EACH + start + tl.arange(0, STEP)
        expert = tl.load(experts + at, mask=at < size, other=-1)
        mine = (expert[:, None] == column[None, :]).to(tl.int32)
        before = next_[None, :] + tl.cumsum(mine, axis=0) - 1
        position = tl.sum(tl.where(mine != 0, before, 0), axis=1)
        known = (expert >= 0) & (expert < count)
        tl.store(positions + at, tl.where(known, position, -1), mask=at < size)
        next_ += tl.sum(mine, axis=0)

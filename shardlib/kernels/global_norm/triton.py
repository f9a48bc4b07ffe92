"""Σ x² by Triton kernels: a program per tile, then one over the tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles

TILE = 4096

load: tiles.Loader = tiles.triton_name


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    count = triton.cdiv(x.numel(), TILE)
    out = torch.zeros((), dtype=torch.float64, device=x.device)
    partial = torch.empty(count, dtype=torch.float64, device=x.device)
    if count:
        _tiles[(count,)](x, x.numel(), partial, TILE=TILE, **tiles.EXACT)
        _total[(1,)](partial, count, out, STEP=1024, **tiles.EXACT)
    return out


@triton.jit
def _tiles(x, count, partial, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    wide = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32).to(tl.float64)
    tl.store(partial + tile, tl.sum(wide * wide))


@triton.jit
def _total(partial, count, out, STEP: tl.constexpr):
    total = tl.zeros((STEP,), tl.float64)
    for first in range(0, count, STEP):
        at = first + tl.arange(0, STEP)
        total += tl.load(partial + at, mask=at < count, other=0.0)
    tl.store(out, tl.sum(total))

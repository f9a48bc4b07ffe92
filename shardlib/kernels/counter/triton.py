"""Random bits from a counter, by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles

TILE = 1024

load: tiles.Loader = tiles.triton_name


def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(index)
    if count := index.numel():
        halves = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        _random_bits[(triton.cdiv(count, TILE),)](index, out, count, *halves, TILE=TILE)
    return out


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def bits_of(index, seed_low, seed_high):
    """24 bits, uint32, for int64 indices and the two halves of a seed."""
    low = (index & 0xFFFFFFFF).to(tl.uint32) ^ seed_low.to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ seed_high.to(tl.uint32)
    return mix(mix(low) ^ mix(high)) >> 8


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _random_bits(index, out, count, seed_low, seed_high, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    number = tl.load(index + i, mask=i < count, other=0)
    tl.store(out + i, bits_of(number, seed_low, seed_high).to(tl.int64), mask=i < count)

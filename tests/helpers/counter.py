"""The counter's random bits in Python's integers, which every implementation must equal.

As a script it holds the Triton kernel to that under Triton's interpreter.
"""

import torch

from shardlib.kernels.counter import random_bits

EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**63 - 1, -1, -(2**63)]
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32 + 7, 2**63, 2**64 - 1, -5]


def mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def spread(seed: int) -> int:
    """A step of SplitMix64."""
    x = (seed + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def bits(seed: int, index: int) -> int:
    seed = spread(seed)
    low, high = (index ^ seed) % 2**32, ((index ^ seed) >> 32) % 2**32
    return mixed(mixed(low) ^ mixed(high)) >> 8


def check(using: str | None, seed: int, numbers: list[int]) -> None:
    found = random_bits(seed, torch.tensor(numbers, dtype=torch.int64), using=using)
    assert found.dtype == torch.int64
    assert found.tolist() == [bits(seed, number) for number in numbers]


if __name__ == "__main__":
    for seed in SEEDS:
        check("triton", seed, EDGES + list(range(2000)))
    check("triton", 1, [])

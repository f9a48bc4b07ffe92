"""bits(seed, i): 24 random bits for element i, a pure function of seed and i on every device.

Three rounds of the 32-bit mixer "lowbias32" (xor-shift-multiply), which C. Wellons' hash prospector found:
bits = mix(mix(i_low ⊕ s_low) ⊕ mix(i_high ⊕ s_high)) ≫ 8 with s = `spread` (seed), computed once per call and passed to the
implementation. Without spreading, seeds with the same upper bits would give permutations of one list of numbers. The bits of
a seed must never change: checkpoints store seeds.

i and the bits are int64, ``[...]``. Bytes moved per element: 16; plain torch moves some 400. Operations: 25 of integers.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import opaque

__all__ = ["random_bits", "signed", "spread"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}
_MASK = 2**64 - 1
_LOW = 0xFFFFFFFF


def random_bits(seed: int, index: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """24 bits for each element of ``index`` (int64), as int64 in its shape.

    Args:
        seed: taken modulo 2^64.
        using: names one implementation ("cpu", "triton", "reference"), for tests.

    Raises:
        TypeError: ``index`` is not int64.
    """
    check_tensors("random_bits", {"index": index}, exactly={"index": torch.int64})
    return _random_bits(signed(seed), index, using)[0]


def spread(seed: int) -> int:
    """A seed with all 64 bits mixed, as a signed integer; different seeds stay different.

    A step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 17).
    """
    x = (seed + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return signed(x ^ (x >> 31))


def signed(seed: int) -> int:
    """A seed modulo 2^64 as a signed integer, from −2^63 to 2^63 − 1, as operators take them."""
    seed &= _MASK
    return seed - 2**64 if seed >= 2**63 else seed


def _bits(seed: int, index: torch.Tensor, using: str | None) -> list[torch.Tensor]:
    with on(index.device):
        return [serving("counter", index, using).random_bits(spread(seed), index.contiguous())]


_random_bits = opaque(
    "random_bits", _bits, lambda seed, index, using: [torch.empty_like(index, memory_format=torch.contiguous_format)]
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
        x = _mix((index & _LOW) ^ (seed & _LOW)) ^ _mix((index >> 32 & _LOW) ^ (seed >> 32 & _LOW))
        return _mix(x) >> 8


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


class cpu(native.Compiled, random_bits="lplpi"):
    """By counter.cpp."""

    @staticmethod
    def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(index)
        functions = cpu.library()
        functions.random_bits(seed, index, index.numel(), out, threads())
        return out

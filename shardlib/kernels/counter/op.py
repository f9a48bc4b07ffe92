"""bits(seed, i): 24 random bits for element i, the same wherever and whenever they are computed.

Three rounds of the 32-bit mixer "lowbias32" (xor-shift-multiply), which C. Wellons' hash prospector found:
bits = mix(mix(i_low ⊕ seed_low) ⊕ mix(i_high ⊕ seed_high)) ≫ 8. What is drawn must never change: checkpoints keep seeds.

i and the bits are int64, ``[...]``. Bytes moved per element: 16; plain torch moves some 400. Operations: 25 of integers.
"""

from __future__ import annotations

import torch

from shardlib.kernels.dispatch import on, serving
from shardlib.kernels.operators import opaque

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}


def random_bits(seed: int, index: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """24 bits for each element of ``index`` (int64), as int64 in its shape.

    Args:
        seed: counts modulo 2^64.
        using: names one implementation ("cpu", "triton", "reference"), for tests.

    Raises:
        TypeError: ``index`` is not int64.
    """
    if index.dtype != torch.int64:
        raise TypeError(f"random_bits: index is {index.dtype}; pass int64")
    seed &= 2**64 - 1
    return _random_bits(seed - 2**64 if seed >= 2**63 else seed, index, using)[0]  # an operator's integers are signed


def _bits(seed: int, index: torch.Tensor, using: str | None) -> list[torch.Tensor]:
    with on(index.device):
        return [serving("counter", index, using).random_bits(seed, index.contiguous())]


_random_bits = opaque(
    "random_bits", _bits, lambda seed, index, using: [torch.empty_like(index, memory_format=torch.contiguous_format)]
)

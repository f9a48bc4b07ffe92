"""Random bits from a counter: a 32-bit integer hash of (seed, index), the same wherever and whenever it is computed.

Three xor-shift-multiply rounds, the "lowbias32" mixer found by C. Wellons' hash prospector, applied to the index after a
first mix with each half of the seed. What is drawn must never change: checkpoints keep seeds.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
    """24 bits for each element of ``index`` (int64), as int64. ``seed`` counts modulo 2^64."""
    x = _mix((index & _MASK) ^ (seed & _MASK)) ^ _mix((index >> 32) ^ (seed >> 32 & _MASK))
    return _mix(x) >> 8


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)

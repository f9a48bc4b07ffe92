"""Counter-based randomness: a key and a global index give the same bits on every mesh.

The generator is a 32-bit integer hash of (key, element index): three xor-shift-multiply rounds, the "lowbias32"
mixer found by C. Wellons' hash prospector, applied to the index after a first mix with each half of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from shardlib.parts import current_parts


@dataclass(frozen=True)
class Key:
    """A key for counter-based randomness.

    ``slot`` says which share of the global batch the caller holds (rank along the batch axes × micro-batches
    + micro-batch): an activation whose leading dimension is the batch takes its random numbers at
    ``slot * x.numel()`` onwards, so every mesh draws the same mask for the same sample. It is a fraction where shares
    differ: the first row over the number of rows.
    """

    seed: int
    slot: int | Fraction = 0

    def fold_in(self, data: int | str) -> Key:
        """A new, independent key for ``data`` (a step, a layer's index or name)."""
        digest = hashlib.blake2b(f"{self.seed}/{data}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "little"))

    def at_slot(self, slot: int | Fraction) -> Key:
        return replace(self, slot=slot)


def random_bits(key: Key, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` 24-bit integers as int64, for elements ``slot * count`` to ``(slot + 1) * count``."""
    start = int(key.slot * count)
    return bits_at(key, torch.arange(start, start + count, dtype=torch.int64, device=device))


def bits_at(key: Key, places: torch.Tensor) -> torch.Tensor:
    """24-bit integers as int64, for the elements of these numbers (int64)."""
    x = _mix((places & _MASK) ^ (key.seed & _MASK)) ^ _mix((places >> 32) ^ (key.seed >> 32 & _MASK))
    return _mix(x) >> 8


def uniform(
    key: Key,
    shape: tuple[int, ...] | torch.Size,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Uniform numbers in [0, 1) on a grid of 2^-24."""
    count = torch.Size(shape).numel()
    return (random_bits(key, count, device).to(torch.float32) * 2.0**-24).to(dtype).reshape(shape)


def dropout(x: torch.Tensor, p: float, key: Key) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    The mask depends on the key and the element's index in the global batch alone (dimension 0 of ``x`` is the
    batch, or a multiple of it), so it is equal on every mesh and under recompute. Under a sequence plan, dimension 1
    of an ``x`` that has one is this rank's part of the sequence.

    Raises:
        ValueError: ``p`` outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is outside [0, 1)")
    if p == 0.0:
        return x
    keep = bits_at(key, _indices(x, key.slot)) >= int(p * 2**24)
    return x * (keep.to(x.dtype) / (1.0 - p)).reshape(x.shape)


@contextmanager
def seeding_torch(key: Key | None, device: torch.device) -> Iterator[None]:
    """Let what draws from torch's own generators meanwhile draw by ``key`` and its slot; then they are as they were.

    For code that knows no keys: modules' own dropout. Without a key nothing is done.
    """
    if key is None:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        here = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[here])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(key.fold_in(f"torch at {key.slot}").seed)
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def _indices(x: torch.Tensor, slot: int | Fraction) -> torch.Tensor:
    """The index of each element of ``x`` in the whole tensor of all batches and, under a sequence plan, all positions."""
    parts = current_parts.get()
    if parts is None or x.dim() < 2:
        start = int(slot * x.numel())
        return torch.arange(start, start + x.numel(), dtype=torch.int64, device=x.device)
    positions, length = parts.positions(x)
    batch, rest = x.shape[0], x.shape[2:].numel()
    first = int(slot * batch)
    rows = torch.arange(first, first + batch, device=x.device)[:, None] * length + positions
    return (rows[..., None] * rest + torch.arange(rest, device=x.device)).flatten()


_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)

"""Counter-based randomness: a key and a global index give the same bits on every mesh.

The generator is a hash of (key, element index); see `shardlib.kernels.counter`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Rational

import torch

from shardlib.kernels import counter


@dataclass(frozen=True)
class Key:
    """A key for counter-based randomness. Keys of different seeds are independent, however near the seeds are.

    ``slot`` says which share of the global batch the caller holds (rank along the batch axes × micro-batches
    + micro-batch): an activation whose leading dimension is the batch takes its random numbers at
    ``slot * x.numel()`` onwards, so every mesh draws the same mask for the same sample. It is a fraction where shares
    differ: the first row over the number of rows.

    ``seed`` has 64 bits; a negative one is that plus 2^64, as in torch.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a seed of more than 64 bits; a slot that is no integer or Fraction, or negative.
    """

    seed: int
    slot: int | Fraction = 0

    def __post_init__(self) -> None:
        try:
            seed = operator.index(self.seed)
        except TypeError:
            raise TypeError(
                f"Key({self.seed!r}): a seed is an integer; for a name use sl.Key(0).fold_in(name)"
            ) from None
        if not -(2**63) <= seed < 2**64:
            raise ValueError(
                f"Key: a seed of {seed.bit_length()} bits, and 64 are the most; sl.Key(0).fold_in(seed) takes any integer"
            )
        if not isinstance(self.slot, Rational) or self.slot < 0:
            raise ValueError(f"Key: slot={self.slot!r} is no share of a batch: use an integer or a Fraction, 0 or more")
        object.__setattr__(self, "seed", seed % 2**64)

    def fold_in(self, data: int | str) -> Key:
        """A new, independent key for ``data`` (a step, a layer's index or name); 1 and "1" give different ones.

        Raises:
            TypeError: ``data`` is neither a string nor an integer.
        """
        if isinstance(data, str):
            text = f"{self.seed}:{data}"
        else:
            try:
                text = f"{self.seed}/{operator.index(data)}"
            except TypeError:
                raise TypeError(f"fold_in({data!r}): fold in an integer or a string, such as str(...) of it") from None
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "little"))

    def at_slot(self, slot: int | Fraction) -> Key:
        return replace(self, slot=slot)

    def stretch(self, count: int) -> tuple[int, int]:
        """The seed of a tensor of ``count`` elements (or rows) of this slot, and the number of the first one.

        Where the slot's first row is not at a whole number of elements the tensor has no rows of the batch, and what it
        draws is this slot's own, not a part of what its neighbours draw.
        """
        first = self.slot * count
        if first == int(first):
            return self.seed, int(first)
        return self.fold_in(f"slot {self.slot}").seed, 0


def require_key(function: str, name: str, value: object) -> Key:
    """
    Raises:
        TypeError: ``value`` is no key; an int would give the same mask at every step.
    """
    if isinstance(value, Key):
        return value
    seed = value if type(value) is int else "seed"
    raise TypeError(
        f"{function}: {name} is {value!r}, and no key; pass the rng that a loss function is given, or sl.Key({seed}), "
        "folded with the step"
    )


def random_bits(key: Key, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` 24-bit integers as int64, for elements ``slot * count`` to ``(slot + 1) * count``."""
    seed, start = require_key("random_bits", "key", key).stretch(count)
    return counter.random_bits(seed, torch.arange(start, start + count, dtype=torch.int64, device=device))


def bits_at(key: Key, places: torch.Tensor) -> torch.Tensor:
    """The 24-bit integers of the key's seed with the int64 numbers ``places``, as int64."""
    return counter.random_bits(require_key("bits_at", "key", key).seed, places)


def uniform(
    key: Key,
    shape: tuple[int, ...] | torch.Size,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Uniform numbers in [0, 1) on a grid of 2^-24; of 2^-11 in fp16 and 2^-8 in bf16, where a finer one would reach 1."""
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    bits = random_bits(key, torch.Size(shape).numel(), device) >> (24 - digits)
    return (bits.to(torch.float32) * 2.0**-digits).to(dtype).reshape(shape)


@contextmanager
def seeding_torch(key: Key | None, device: torch.device) -> Iterator[None]:
    """Let what draws from torch's own generators meanwhile draw by ``key`` and its slot; then they are as they were.

    For code that knows no keys: modules' own dropout. Without a key nothing is done.
    """
    if key is None:
        yield
        return
    states = states_of_generators(device)
    try:
        for generator, _ in states:
            generator.manual_seed(key.fold_in(f"torch at {key.slot}").seed)
        yield
    finally:
        restore_generators(states)


def states_of_generators(device: torch.device) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Torch's own generators, of the CPU and of ``device``, each with its state."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        here = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[here])
    return [(generator, generator.get_state()) for generator in generators]


def restore_generators(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Set generators back to what `states_of_generators` gave."""
    for generator, state in states:
        generator.set_state(state)

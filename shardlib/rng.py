"""Counter-based randomness: a key and a global index give the same bits on every mesh.

The generator is a hash of the key's seed and the element's index; see `shardlib.kernels.counter`.
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

from shardlib.common._compat import recording
from shardlib.common.devices import default_generator
from shardlib.kernels import counter


@dataclass(frozen=True)
class Key:
    """A key for counter-based randomness. Keys of different seeds are independent, however close the seeds are.

    Attributes:
        seed: 64 bits; a negative seed stands for itself plus 2^64, as in torch.
        slot: which share of the global batch the caller holds (rank along the batch axes × micro-batches + micro-batch).
            An activation whose leading dimension is the batch takes the random numbers from ``slot * x.numel()`` on, so
            that every mesh draws the same mask for the same sample. A fraction if shares differ in size: the share's first
            row over its number of rows.

    Raises:
        TypeError: a seed that is not an integer.
        ValueError: a seed of more than 64 bits; a slot that is negative, or neither an integer nor a Fraction.
    """

    seed: int
    slot: int | Fraction = 0

    def __post_init__(self) -> None:
        try:
            seed = operator.index(self.seed)
        except TypeError:
            raise TypeError(f"Key({self.seed!r}): a seed is an integer; use sl.Key(0).fold_in(name)") from None
        if not -(2**63) <= seed < 2**64:
            raise ValueError(
                f"Key: a seed of {seed.bit_length()} bits, and 64 are the most; use sl.Key(0).fold_in(seed)"
            )
        if not isinstance(self.slot, Rational) or self.slot < 0:
            raise ValueError(f"Key: slot={self.slot!r} is no share of a batch: use an integer or a Fraction, 0 or more")
        object.__setattr__(self, "seed", seed % 2**64)

    def fold_in(self, data: int | str) -> Key:
        """A new, independent key for ``data`` (a step, a layer's index or name); 1 and "1" give different keys.

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
        """The key of the same seed for another slot."""
        return replace(self, slot=slot)

    def stretch(self, count: int) -> tuple[int, int]:
        """The seed for a tensor of ``count`` elements (or rows) of this slot, and the index of its first element.

        If the slot is a fraction and ``slot * count`` is not an integer, the tensor has no rows of the batch. The seed is
        then one of this slot's own, and the index 0.

        Raises:
            TypeError: the tensor is drawn inside a trace, of which the seed would be a constant.
        """
        _require_untraced()
        first = self.slot * count
        if first == int(first):
            return self.seed, int(first)
        return self.fold_in(f"slot {self.slot}").seed, 0


def _require_untraced() -> None:
    """Raise inside a trace by make_fx or torch.export. (torch.compile traces anew for another key.)"""
    if not torch.compiler.is_dynamo_compiling() and recording():
        raise TypeError(
            "numbers are drawn by a sl.Key inside a trace (make_fx, torch.export). Draw them outside and pass them in "
            "(shardlib.rng.uniform(key, shape)), or use torch.compile"
        )


def require_key(function: str, name: str, value: object) -> Key:
    """Return ``value`` if it is a key; ``function`` and ``name`` are for the message.

    Raises:
        TypeError: ``value`` is not a key; an int, for example, would give the same mask at every step.
    """
    if isinstance(value, Key):
        return value
    seed = value if type(value) is int else "seed"
    raise TypeError(
        f"{function}: {name} is {value!r}, and no key; pass the loss function's rng, or sl.Key({seed}), folded with the step"
    )


def random_bits(key: Key, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` 24-bit integers as int64, for elements ``slot * count`` to ``(slot + 1) * count``."""
    seed, start = require_key("random_bits", "key", key).stretch(count)
    return counter.random_bits(seed, torch.arange(start, start + count, dtype=torch.int64, device=device))


def bits_at(key: Key, indices: torch.Tensor) -> torch.Tensor:
    """The 24-bit integers of the key's seed at int64 ``indices``, as int64."""
    _require_untraced()
    return counter.random_bits(require_key("bits_at", "key", key).seed, indices)


def uniform(
    key: Key,
    shape: tuple[int, ...] | torch.Size,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24; of 2^-11 in fp16 and 2^-8 in bf16, as finer ones would round to 1."""
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    bits = random_bits(key, torch.Size(shape).numel(), device) >> (24 - digits)
    return (bits.to(torch.float32) * 2.0**-digits).to(dtype).reshape(shape)


@contextmanager
def seeding_torch(key: Key | None, device: torch.device) -> Iterator[None]:
    """A context in which torch's generators are seeded by ``key`` and its slot; their states are restored at the end.

    For code without keys, such as modules' own dropout. Does nothing without a key.
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
    """Torch's default generators of the CPU and of ``device``, each with its state."""
    generators = dict.fromkeys([torch.default_generator, default_generator(device)])
    return [(generator, generator.get_state()) for generator in generators]


def restore_generators(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Restore generators to states from `states_of_generators`."""
    for generator, state in states:
        generator.set_state(state)

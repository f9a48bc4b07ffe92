"""Random numbers of tokens: the same for the same token on every mesh."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shardlib.common.environment import environment
from shardlib.kernels import counter
from shardlib.rng import Key

_UNIT = 2.0**-24  # of random bits


class Tokens(NamedTuple):
    """A key, and where a batch's tokens are in the global batch.

    Attributes:
        rows: of the batch, dimension 0, that the caller holds.
        places: ``[tokens of a row]``, int64: where each is among the tokens of its row in the global batch.
        length: the number of these.
    """

    key: Key
    rows: int
    places: torch.Tensor
    length: int

    def bits(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]``: 24 random bits each; other names give others."""
        device = self.places.device
        seed, first = self.key.fold_in(name).stretch(self.rows)
        starts = torch.arange(first, first + self.rows, device=device) * self.length
        indices = (starts[:, None] + self.places).flatten()
        return counter.random_bits(seed, indices[:, None] * columns + torch.arange(columns, device=device))

    def uniform(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` in fp32, in (0, 1)."""
        return ((self.bits(name, columns).double() + 0.5) * _UNIT).float().clamp(max=1 - _UNIT)

    def gumbel(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` of a Gumbel distribution: the largest of ``logits + gumbel`` is drawn as from their softmax."""
        return -(-self.uniform(name, columns).log()).log()


def tokens_of(x: torch.Tensor, key: Key | None) -> Tokens | None:
    """What the random numbers of the tokens of ``x`` ``[..., width]`` are drawn by; None without a key.

    Dimension 0 is the batch, and under a sequence plan dimension 1 this rank's sequence part.
    """
    if key is None:
        return None
    rows, *others = x.shape[:-1] or (1,)
    parts = environment().parts
    if parts is None or not others:
        length = math.prod(others)
        return Tokens(key, rows, torch.arange(length, device=x.device), length)
    positions, length = parts.positions(x)
    rest = math.prod(others[1:])
    places = positions[:, None] * rest + torch.arange(rest, device=x.device)
    return Tokens(key, rows, places.flatten(), length * rest)

"""Random numbers of tokens: the same for the same token on every mesh."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.common.environment import environment
from shardlib.rng import Key, bits_at

_UNIT = 2.0**-24  # of random bits


class Tokens(NamedTuple):
    """A key, and the indices of a batch's tokens in the global batch.

    Attributes:
        indices: ``[T]``, int64.
    """

    key: Key
    indices: torch.Tensor

    def bits(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]``: 24 random bits each; other names give others."""
        index = self.indices[:, None] * columns + torch.arange(columns, device=self.indices.device)
        return bits_at(self.key.fold_in(name), index)

    def uniform(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` in fp32, in (0, 1)."""
        return ((self.bits(name, columns).double() + 0.5) * _UNIT).float().clamp_(max=1 - _UNIT)

    def gumbel(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` of a Gumbel distribution: the largest of ``logits + gumbel`` is drawn as from their softmax."""
        return -(-self.uniform(name, columns).log()).log()


def tokens_of(x: torch.Tensor, key: Key | None) -> Tokens | None:
    """What the random numbers of the tokens of ``x`` ``[..., width]`` are drawn by; None without a key.

    Dimension 0 is the batch, and under a sequence plan dimension 1 this rank's sequence part.
    """
    if key is None:
        return None
    parts = environment().parts
    if parts is None or x.dim() < 3:
        count = x.shape[:-1].numel()
        seed, first = key.stretch(count)
        return Tokens(Key(seed), torch.arange(first, first + count, device=x.device))
    positions, length = parts.positions(x)
    seed, first = key.stretch(x.shape[0])
    rest = x.shape[2:-1].numel()
    starts = (torch.arange(first, first + x.shape[0], device=x.device)[:, None] * length + positions) * rest
    return Tokens(Key(seed), (starts[..., None] + torch.arange(rest, device=x.device)).flatten())

"""`New`: the tokens that one step adds to sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardlib.kernels.decoder_attention import Seats


@dataclass(frozen=True)
class New:
    """The new tokens of several sequences, which lie one after the other.

    Attributes:
        rows: the rows of the cache that the sequences have. Sequences with several new tokens come first.
        starts: the number of tokens of each sequence that the cache holds.
        tokens: the new tokens of each sequence, at least one. The first tokens of a sequence come at once.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]

    def flat(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their positions in their sequences, int64 ``[T]`` each."""
        tokens = [token for tokens in self.tokens for token in tokens]
        positions = [start + i for start, tokens in zip(self.starts, self.tokens) for i in range(len(tokens))]
        return torch.tensor([tokens, positions], dtype=torch.int64, device=device).unbind()  # type: ignore[return-value]

    def last(self, device: torch.device) -> torch.Tensor:
        """The index in ``[T]`` of each sequence's last new token, int64."""
        return torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.int64, device=device).cumsum(0) - 1

    @cached_property
    def prompts(self) -> list[tuple[int, slice]]:
        """The row, and the range in ``[T]``, of each sequence with several new tokens."""
        found, first = [], 0
        for row, tokens in zip(self.rows, self.tokens):
            if len(tokens) > 1:
                found.append((row, slice(first, first + len(tokens))))
                first += len(tokens)
        return found

    @cached_property
    def singles(self) -> tuple[int, Seats]:
        """Of sequences with one new token: their first index in ``[T]``, and where they stand in the cache."""
        count = len(self.prompts)
        rows, starts = (torch.tensor(numbers[count:], dtype=torch.int64) for numbers in (self.rows, self.starts))
        return self.prompts[-1][1].stop if count else 0, Seats(rows, starts)

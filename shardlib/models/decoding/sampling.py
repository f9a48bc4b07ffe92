"""`Sampling`: the choice of the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlib.rng import Key, bits_at


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. A draw depends on ``seed``, on the prompt's number and on the new token's, and on nothing else.

    Attributes:
        temperature: divides the logits; at 0 the most likely token is taken.
        top_k: only so many tokens, the most likely ones, can be drawn; None for all.
        top_p: only the most likely tokens can be drawn, as few as have this probability together (nucleus sampling, arXiv
            1904.09751, section 3.1); after ``temperature`` and ``top_k``, as in transformers.
        seed: of the draws.

    Raises:
        ValueError: a negative temperature, ``top_k`` below 1, ``top_p`` outside of (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"generate: temperature={self.temperature}, but it must be a number of at least 0")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(
                f"generate: top_k={self.top_k!r}, but it must be a whole number of at least 1; None takes all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p={self.top_p}, but it must lie in (0, 1]; 1 takes all tokens")

    def choose(self, logits: torch.Tensor, prompts: Sequence[int], number: int) -> list[int | None]:
        """The next token of each prompt; None where its logits have no largest one that is finite.

        Args:
            logits: ``[N, V]``.
            prompts: the numbers of the N prompts among all prompts on all ranks.
            number: of the new token: 0 for the first after the prompt.
        """
        best = logits.max(-1)  # several times faster than argmax
        finite = best.values.isfinite().tolist()  # a NaN is the largest of numbers
        tokens = best.indices.tolist() if self.temperature == 0 else self._drawn(logits, prompts, number)
        return [token if usable else None for token, usable in zip(tokens, finite)]

    def _drawn(self, logits: torch.Tensor, prompts: Sequence[int], number: int) -> list[int]:
        key = Key(self.seed).fold_in("generate").fold_in(number)
        bits = bits_at(key, torch.tensor(prompts, dtype=torch.int64)).to(logits.device)
        uniform = (bits.double() + 0.5) / 2**24
        odds = self.probabilities(logits)
        sums = odds.cumsum(-1)
        # The first token at which the sum of probabilities exceeds the drawn share of it.
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0].tolist()

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """What is drawn from, float64 ``[N, V]``, up to a factor; 0 for tokens that cannot be drawn."""
        logits = logits.double()
        # The largest becomes 0, which no temperature makes infinite.
        odds = torch.softmax((logits - logits.amax(-1, keepdim=True)) / self.temperature, -1)
        if self.top_k is not None and self.top_k < odds.shape[-1]:
            best = odds.topk(self.top_k)
            odds = torch.zeros_like(odds).scatter_(-1, best.indices, best.values)
        if self.top_p < 1:
            falling, order = odds.sort(dim=-1, descending=True, stable=True)
            before = falling.cumsum(-1) - falling  # the first one is always kept
            falling = falling.masked_fill(before >= self.top_p * falling.sum(-1, keepdim=True), 0)
            odds = torch.zeros_like(odds).scatter_(-1, order, falling)
        return odds

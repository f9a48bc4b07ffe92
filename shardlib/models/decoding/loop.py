"""`decode`: draws token after token for several prompts; `Sampling`: the choice of the next one from logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardlib.models.decoding.cache import Attend, Cache, NewTokens
from shardlib.models.decoding.decoder import Decoder
from shardlib.rng import Key, bits_at

# ``run(function)`` is ``function(parameters)``.
Run = Callable[[Callable[[Any], torch.Tensor]], torch.Tensor]


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
            raise ValueError(f"generate: top_k={self.top_k!r}, but it must be at least 1; None takes all tokens")
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


def decode(
    decoder: Decoder,
    run: Run,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    max_new: int,
    sampling: Sampling,
    stop: Collection[int],
    device: torch.device,
    more: Callable[[bool], bool] = bool,
) -> list[list[int | None]]:
    """The new tokens of each prompt. Where logits are not finite a sequence ends, with None for a token.

    A step runs the model once, on the new tokens of all sequences that are not finished: of their prompts in the first step,
    then of one token each. The context is the last ``decoder.sequence`` tokens. Where that window moves, all positions in it
    change, and its keys and values are computed anew for every token.

    Args:
        run: calls a function with the model's parameters, `Decoder.prepared`; each step runs once, by one call.
        numbers: the number of each prompt among those of all ranks.
        max_new: the most new tokens of a prompt.
        stop: tokens after which a sequence ends; they are its last one.
        more: of whether this rank has sequences that are not finished, whether any rank has; where ranks gather parameters
            from each other, all of them run the model until all are done.
    """
    texts: list[list[int]] = [list(prompt) for prompt in prompts]
    broken: set[int] = set()
    lengths = [0] * len(texts)  # in the cache
    longest = max((len(prompt) for prompt in prompts), default=1) + max_new
    cache = Cache(len(texts), min(longest, decoder.sequence))
    active = list(range(len(texts))) if max_new else []
    number = 0
    with torch.no_grad():
        while more(bool(active)):
            new = _new(texts, lengths, active, decoder.sequence)
            logits = run(partial(_logits, decoder, cache, new, device))
            chosen = sampling.choose(logits, [numbers[row] for row in new.rows], number)
            for row, start, given, token in zip(new.rows, new.starts, new.tokens, chosen):
                if token is None:
                    broken.add(row)
                    continue
                texts[row].append(token)
                lengths[row] = start + len(given)
            number += 1
            going = number < max_new
            active = [row for row in active if going and row not in broken and texts[row][-1] not in stop]
    return [
        [*text[len(prompt) :], *([None] if row in broken else [])]
        for row, (text, prompt) in enumerate(zip(texts, prompts))
    ]


def _logits(decoder: Decoder, cache: Cache, new: NewTokens, device: torch.device, params: Any) -> torch.Tensor:
    """The logits after the last new token of each sequence. Storing keys and values a second time changes nothing."""
    tokens, positions = new.flat(device)
    x = decoder.hidden(params, tokens, positions, Attend(cache, new))
    return decoder.logits(params, x[new.last(device)])


def _new(texts: Sequence[list[int]], lengths: Sequence[int], active: Sequence[int], sequence: int) -> NewTokens:
    """What the next step adds to the cache: what is not in it, or the whole window where the window moves."""
    starts = {row: lengths[row] if len(texts[row]) <= sequence else 0 for row in active}
    tokens = {row: texts[row][-sequence:][start:] for row, start in starts.items()}
    rows = sorted(active, key=lambda row: len(tokens[row]) == 1)
    return NewTokens(rows, [starts[row] for row in rows], [tokens[row] for row in rows])

"""`decode`: draws token after token for several prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from shardlib.models.decoding.cache import Attending, Cache
from shardlib.models.decoding.decoder import Decoder
from shardlib.models.decoding.new import New
from shardlib.models.decoding.sampling import Sampling

# ``run(function)`` is ``function(parameters)``.
Run = Callable[[Callable[[Any], torch.Tensor]], torch.Tensor]


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


def _logits(decoder: Decoder, cache: Cache, new: New, device: torch.device, params: Any) -> torch.Tensor:
    """The logits after the last new token of each sequence. Storing keys and values a second time changes nothing."""
    tokens, positions = new.flat(device)
    x = decoder.hidden(params, tokens, positions, Attending(cache, new))
    return decoder.logits(params, x[new.last(device)])


def _new(texts: Sequence[list[int]], lengths: Sequence[int], active: Sequence[int], sequence: int) -> New:
    """What the next step adds to the cache: what is not in it, or the whole window where the window moves."""
    starts = {row: lengths[row] if len(texts[row]) <= sequence else 0 for row in active}
    tokens = {row: texts[row][-sequence:][start:] for row, start in starts.items()}
    rows = sorted(active, key=lambda row: len(tokens[row]) == 1)
    return New(rows, [starts[row] for row in rows], [tokens[row] for row in rows])

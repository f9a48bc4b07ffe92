"""Texts drawn one token at a time from scores that a function computes anew for every token: the oracle of `sl.generate`."""

import torch


def uncached(scores, prompt, max_new, number, sequence, sampling, stop=()):
    """The new tokens of one prompt.

    ``scores(tokens)`` are the logits ``[V]`` after the tokens ``[S]``; ``number`` is the prompt's.
    """
    text = list(prompt)
    with torch.no_grad():
        for step in range(max_new):
            logits = scores(torch.tensor(text[-sequence:]))
            text += sampling.choose(logits[None], [number], step)
            if text[-1] in stop:
                break
    return text[len(prompt) :]

"""n-gram models of a text's bytes, whose losses a trained model should beat, and a loss over bytes in other units."""

import math
import sys

import numpy as np

_SYMBOLS = 256


def ngram_losses(train: np.ndarray, validation: np.ndarray, highest: int = 2) -> list[float]:
    """Losses of the models of order 0 … ``highest``, in nats per byte of ``validation``.

    ``train`` and ``validation`` are (N,) uint8. A model of order k counts which bytes follow each sequence of k bytes in
    ``train``, and blends the counts with the model of order k-1 by the rule of Witten and Bell (1991): with c the counts
    after a context, n their sum and d the number of different bytes after it,

        p_k(x | context) = (c(x) + d · p_{k-1}(x | shorter context)) / (n + d),   p_{-1} = 1/256.

    The first ``highest`` bytes of ``validation`` are only context, for every order, so that all orders are measured on the
    same bytes.

    Raises:
        ValueError: ``highest`` is not in 0 … 2 (the table of order 3 would take 16 GB), or a text is not longer than it.
    """
    if not 0 <= highest <= 2:
        raise ValueError(f"ngram_losses: highest={highest}, but only the orders 0, 1 and 2 are counted")
    if min(len(train), len(validation)) <= highest:
        raise ValueError(f"ngram_losses: an order-{highest} model needs more than {highest} bytes of text")
    probability = np.full(len(validation) - highest, 1 / _SYMBOLS)
    losses = []
    for order in range(highest + 1):
        counts = np.bincount(_codes(train, order), minlength=_SYMBOLS ** (order + 1)).astype(np.int32)
        followed = counts.reshape(-1, _SYMBOLS)
        total, different = followed.sum(1), (followed > 0).sum(1)
        code = _codes(validation, order)[highest - order :]
        n, d = total[code // _SYMBOLS], different[code // _SYMBOLS]
        # For a context that never occurred, the model of the shorter context is used.
        blended = (counts[code] + d * probability) / np.maximum(n + d, 1)
        probability = np.where(n > 0, blended, probability)
        losses.append(float(-np.log(probability).mean()))
    return losses


def _codes(text: np.ndarray, order: int) -> np.ndarray:
    """For each byte, the number in base 256 formed by the ``order`` bytes before it and itself."""
    code = np.zeros(len(text) - order, dtype=np.int64)
    for offset in range(order + 1):
        code = code * _SYMBOLS + text[offset : len(text) - order + offset]
    return code


_LARGEST = math.log(sys.float_info.max)


def byte_scores(loss: float) -> dict[str, float]:
    """``loss`` in nats per byte, ``bits_per_byte`` (loss/ln 2) and ``perplexity`` (e^loss)."""
    perplexity = math.exp(loss) if loss < _LARGEST else math.inf  # math.exp raises on overflow
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": perplexity}

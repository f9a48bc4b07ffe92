"""Learning rates for another batch size than the one that they were tuned for."""

from __future__ import annotations

import math

from shardlib.optim.ranges import is_step


def linear_scaling(lr: float, batch: int, reference_batch: int) -> float:
    """``lr·batch/reference_batch``, for SGD after warm-up (Goyal et al., arXiv 1706.02677).

    Args:
        lr: a peak rate that was tuned for ``reference_batch``.
        batch: rows (or tokens) of the new global batch.
        reference_batch: rows (or tokens) of the global batch that ``lr`` was tuned for.

    Raises:
        ValueError: a batch below 1.

    >>> sl.optim.linear_scaling(0.1, batch=1024, reference_batch=256)
    0.4
    """
    return lr * _ratio("linear_scaling", batch, reference_batch)


def sqrt_scaling(lr: float, batch: int, reference_batch: int) -> float:
    """``lr·√(batch/reference_batch)``, for Adam and its variants, whose steps are normalised (You et al., arXiv 1904.00962).

    Arguments and errors are those of `linear_scaling`.

    >>> sl.optim.sqrt_scaling(0.1, batch=1024, reference_batch=256)
    0.2
    """
    return lr * math.sqrt(_ratio("sqrt_scaling", batch, reference_batch))


def _ratio(what: str, batch: int, reference_batch: int) -> float:
    if not (is_step(batch) and is_step(reference_batch)):
        raise ValueError(f"{what}: batches of {batch} and {reference_batch} rows; both are integers from 1")
    return batch / reference_batch

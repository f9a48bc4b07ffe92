"""Learning rates for other batch sizes than the one that they were tuned for, and for steps of different sizes."""

from __future__ import annotations

import math

import torch

from shardlib.optim.checks import check, is_step
from shardlib.optim.code import coded_schedule
from shardlib.optim.schedules.base import Schedule, as_schedule, on_numbers

_POWERS = {"linear": 1.0, "sqrt": 0.5}


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


@coded_schedule
def batch_schedule(lr: float | Schedule, batch: Schedule, reference_batch: int, *, scaling: str = "sqrt") -> Schedule:
    """``lr`` at each step, scaled to the batch of that step as `linear_scaling` and `sqrt_scaling` do.

    DeepSpeed's rescaling for variable batch sizes (``lr_scaling_method``).

    Args:
        lr: a rate, or a schedule of it, that was tuned for ``reference_batch``.
        batch: the rows (or tokens) of a step, a function of the step, such as a pace of `sl.data`.
        reference_batch: rows (or tokens) of the global batch that ``lr`` was tuned for.
        scaling: "linear" or "sqrt".

    Raises:
        ValueError: another scaling, a reference batch below 1, or a rate that is no schedule.

    >>> rows = sl.data.discrete_pace([64, 256], until=[9])
    >>> rate = sl.optim.batch_schedule(0.1, rows, 64)
    >>> float(rate(9)), float(rate(10))
    (0.1, 0.2)
    """
    if scaling not in _POWERS:
        raise ValueError(f"batch_schedule: scaling={scaling!r}: use {' or '.join(map(repr, _POWERS))}")
    check(
        "batch_schedule",
        "the reference batch is an integer from 1",
        reference_batch=(reference_batch, is_step(reference_batch)),
    )
    rate, rows = as_schedule(lr, "batch_schedule"), as_schedule(batch, "batch_schedule", "batch")

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        return rate(step) * (rows(step) / reference_batch) ** _POWERS[scaling]

    return schedule


@coded_schedule
def token_schedule(schedule: Schedule, tokens: Schedule) -> Schedule:
    """A schedule of consumed tokens, as one of steps: ``schedule(tokens(step))``.

    Where steps have fewer tokens at first, as under a curriculum, a rate that falls with the step would have fallen too far
    when the same tokens are consumed (arXiv 2108.06084, appendix A.2).

    Args:
        schedule: any schedule, whose steps are tokens here.
        tokens: the number of tokens consumed before a step, a function of the step: `sl.data.Curriculum.tokens`. Skipped
            steps do not advance schedules, so their tokens do not count.

    >>> plan = sl.data.curriculum(4, length=sl.data.discrete_pace([16, 64], until=[9]))
    >>> rate = sl.optim.token_schedule(sl.optim.linear_schedule(1.0, 0.0, 3200), plan.tokens)
    >>> [round(float(rate(step)), 2) for step in (0, 10, 15, 20)]
    [1.0, 0.8, 0.4, 0.0]
    """
    of_tokens, consumed = (
        as_schedule(each, "token_schedule", name) for each, name in ((schedule, "schedule"), (tokens, "tokens"))
    )

    @on_numbers
    def of_steps(step: torch.Tensor) -> torch.Tensor:
        return of_tokens(consumed(step))

    return of_steps


def _ratio(what: str, batch: int, reference_batch: int) -> float:
    if not (is_step(batch) and is_step(reference_batch)):
        raise ValueError(f"{what}: batches of {batch} and {reference_batch} rows; both are integers from 1")
    return batch / reference_batch

"""Schedules with warm-up: optax's names and values where optax has them, else DeepSpeed's.

All take ``warmup``, the shape of the rise: "linear"; or "log", DeepSpeed's default, which is steeper at first: over N warm-up
steps as log(i + 1)/log(N). DeepSpeed's schedules begin one update later, since its first two updates have the first value.
"""

from __future__ import annotations

import math

import torch

from shardlib.optim.checks import check, is_count, is_number
from shardlib.optim.code import coded_schedule
from shardlib.optim.schedules.base import (
    Schedule,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    on_numbers,
    polynomial_schedule,
)


@coded_schedule
def warmup_constant_schedule(
    init_value: float, peak_value: float, warmup_steps: int, *, warmup: str = "linear"
) -> Schedule:
    """Warm-up from ``init_value`` to ``peak_value``, then constant. DeepSpeed's WarmupLR has 1000 steps of "log".

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.warmup_constant_schedule(0.0, 1.0, 10)
    >>> [float(rate(step)) for step in (0, 5, 100)]
    [0.0, 0.5, 1.0]
    """
    return _warm(
        "warmup_constant_schedule", init_value, peak_value, warmup_steps, warmup, constant_schedule(peak_value)
    )


@coded_schedule
def warmup_linear_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    *,
    warmup: str = "linear",
) -> Schedule:
    """Warm-up, then linear to ``end_value`` at step ``decay_steps``, warm-up included; DeepSpeed's WarmupDecayLR.

    Raises:
        ValueError: an argument out of range, or warm-up leaves no step to decay.

    >>> rate = sl.optim.warmup_linear_decay_schedule(0.0, 1.0, 10, 110)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 60, 110)]
    [0.0, 1.0, 0.5, 0.0]
    """
    left = _left("warmup_linear_decay_schedule", warmup_steps, decay_steps)
    return _warm(
        "warmup_linear_decay_schedule",
        init_value,
        peak_value,
        warmup_steps,
        warmup,
        linear_schedule(peak_value, end_value, left),
    )


@coded_schedule
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
    *,
    warmup: str = "linear",
) -> Schedule:
    """Warm-up, then half a cosine to ``end_value`` at step ``decay_steps``, warm-up included.

    DeepSpeed's WarmupCosineLR ends at ``1e-4 * peak_value``.

    Raises:
        ValueError: an argument out of range, warm-up leaves no step to decay, or the peak is 0.

    >>> rate = sl.optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 110)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 60, 110)]
    [0.0, 1.0, 0.5, 0.0]
    """
    left = _left("warmup_cosine_decay_schedule", warmup_steps, decay_steps)
    if peak_value == 0:
        raise ValueError("warmup_cosine_decay_schedule(peak_value=0): a schedule that decays needs a peak")
    decay = cosine_decay_schedule(peak_value, left, end_value / peak_value, exponent)
    return _warm("warmup_cosine_decay_schedule", init_value, peak_value, warmup_steps, warmup, decay)


@coded_schedule
def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
    *,
    warmup: str = "linear",
) -> Schedule:
    """Warm-up, then `exponential_decay`, which counts steps from the end of warm-up.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.warmup_exponential_decay_schedule(0.0, 1.0, 10, 10, 0.5)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 20)]
    [0.0, 1.0, 0.5]
    """
    decay = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return _warm("warmup_exponential_decay_schedule", init_value, peak_value, warmup_steps, warmup, decay)


@coded_schedule
def warmup_stable_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    power: float = 1.0,
    *,
    warmup: str = "linear",
) -> Schedule:
    """Warm-up, ``stable_steps`` at the peak, then a polynomial to ``end_value`` in ``decay_steps`` (arXiv 2404.06395).

    Until the decay begins, the rate does not depend on the length of the run.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.warmup_stable_decay_schedule(0.0, 1.0, 10, 80, 10)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 90, 95, 100)]
    [0.0, 1.0, 1.0, 0.5, 0.0]
    """
    decay = polynomial_schedule(peak_value, end_value, power, decay_steps, stable_steps)
    return _warm("warmup_stable_decay_schedule", init_value, peak_value, warmup_steps, warmup, decay)


def _warm(what: str, init: float, peak: float, steps: int, shape: str, rest: Schedule) -> Schedule:
    """``steps`` of warm-up, then ``rest``, which counts steps from the end of warm-up."""
    check(
        what,
        "values are numbers, and warmup_steps is an integer from 0",
        init_value=(init, is_number(init)),
        peak_value=(peak, is_number(peak)),
        warmup_steps=(steps, is_count(steps)),
    )
    if shape not in ("linear", "log"):
        raise ValueError(f"warmup={shape!r}: use 'linear' or 'log'")
    if steps == 0:
        return rest
    return join_schedules(
        [linear_schedule(init, peak, steps) if shape == "linear" else _log(init, peak, steps), rest], [steps]
    )


def _log(init: float, peak: float, steps: int) -> Schedule:
    if steps < 2:
        raise ValueError(f"warmup='log' over {steps} steps: use at least 2, its first and its last value")

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        return init + (peak - init) * torch.log(step.to(torch.float64).clamp(min=0) + 1) / math.log(steps)

    return schedule


def _left(what: str, warmup_steps: int, decay_steps: int) -> int:
    if not (is_count(warmup_steps) and is_count(decay_steps) and warmup_steps < decay_steps):
        raise ValueError(
            f"{what}: {warmup_steps} of {decay_steps} steps cannot be warm-up; use integers, 0 <= warmup_steps < decay_steps"
        )
    return decay_steps - warmup_steps

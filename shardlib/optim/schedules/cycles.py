"""One-cycle schedules (arXiv 1708.07120), and the learning-rate range test (arXiv 1506.01186)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from shardlib.optim.checks import check, is_number, is_positive, is_share, is_size, is_step
from shardlib.optim.code import CodedSchedule, call_code, coded_schedule
from shardlib.optim.schedules.base import (
    Schedule,
    constant_schedule,
    join_schedules,
    linear_schedule,
    on_numbers,
    piecewise_interpolate_schedule,
)


@coded_schedule
def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Linear from ``peak/div_factor`` up to the peak, back down to it, and down by ``final_div_factor`` more; as optax's.

    The peak is at ``pct_start`` of ``transition_steps``, and the way back ends at ``pct_final``.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.linear_onecycle_schedule(100, 1.0)
    >>> [round(float(rate(step)), 3) for step in (0, 30, 85)]
    [0.04, 1.0, 0.04]
    """
    shares = (pct_start, pct_final)
    _check_cycle("linear_onecycle_schedule", transition_steps, peak_value, div_factor, final_div_factor, *shares)
    boundaries = {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1 / div_factor,
        transition_steps: 1 / final_div_factor,
    }
    return piecewise_interpolate_schedule("linear", peak_value / div_factor, boundaries)


@coded_schedule
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Half cosines from ``peak/div_factor`` to the peak and down to ``peak/(div_factor·final_div_factor)``; as optax's.

    It has its last value at step ``transition_steps``, where torch's OneCycleLR has it at ``total_steps − 1``.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.cosine_onecycle_schedule(100, 1.0)
    >>> [round(float(rate(step)), 3) for step in (0, 30, 100)]
    [0.04, 1.0, 0.0]
    """
    _check_cycle("cosine_onecycle_schedule", transition_steps, peak_value, div_factor, final_div_factor, pct_start)
    boundaries = {
        int(pct_start * transition_steps): div_factor,
        transition_steps: 1 / (div_factor * final_div_factor),
    }
    return piecewise_interpolate_schedule("cosine", peak_value / div_factor, boundaries)


def _check_cycle(
    what: str, steps: int, peak: float, div_factor: float, final_div_factor: float, *shares: float
) -> None:
    """Check a cycle's arguments. ``shares``: the shares of the steps at which all segments but the last end."""
    ends = [int(share * steps) for share in shares if is_positive(share) and is_step(steps)]
    ordered = len(ends) == len(shares) and ends[0] > 0 and ends == sorted(set(ends)) and ends[-1] < steps
    check(
        what,
        "transition_steps is an integer, and every segment of the cycle has at least one step; the peak is a number, and "
        "factors are above 0",
        transition_steps=(steps, is_step(steps)),
        peak_value=(peak, is_number(peak)),
        div_factor=(div_factor, is_positive(div_factor)),
        final_div_factor=(final_div_factor, is_positive(final_div_factor)),
        **{name: (share, ordered) for name, share in zip(("pct_start", "pct_final"), shares, strict=False)},
    )


class OneCycle(NamedTuple):
    """Schedules of the learning rate, and of momentum (SGD's, or Adam's b1), which falls while the rate rises."""

    lr: Schedule
    momentum: Schedule


def one_cycle(
    min_value: float,
    max_value: float,
    first_steps: int = 2000,
    second_steps: int | None = None,
    *,
    decay_rate: float = 0.0,
    decay_steps: int = 1,
    min_momentum: float = 0.8,
    max_momentum: float = 0.9,
) -> OneCycle:
    """A rate that rises to ``max_value`` in ``first_steps`` and falls back in ``second_steps`` (by default as many).

    The rate is ``min_value`` at step 0, ``max_value`` at step ``first_steps``, and ``min_value`` at step ``first_steps +
    second_steps``; i steps later it is ``min_value/(1 + decay_rate·i/decay_steps)``. Momentum falls while the rate rises.
    Each update has the values of DeepSpeed's OneCycle (whose ``last_batch_iteration`` is one less) and of torch's CyclicLR.
    Defaults are DeepSpeed's. Pass the momentum schedule to an optimizer by `inject_hyperparams`.

    Raises:
        ValueError: an argument out of range.

    >>> cycle = sl.optim.one_cycle(0.1, 1.0, 10)
    >>> float(cycle.lr(10)), float(cycle.momentum(10))
    (1.0, 0.8)
    """
    back = first_steps if second_steps is None else second_steps
    check(
        "one_cycle",
        "steps are integers from 1, and decay_rate is at least 0",
        first_steps=(first_steps, is_step(first_steps)),
        second_steps=(back, is_step(back)),
        decay_steps=(decay_steps, is_step(decay_steps)),
        decay_rate=(decay_rate, is_size(decay_rate)),
    )
    check(
        "one_cycle",
        "values are at least 0, momentum below 1",
        min_value=(min_value, is_size(min_value)),
        max_value=(max_value, is_size(max_value)),
        min_momentum=(min_momentum, is_share(min_momentum)),
        max_momentum=(max_momentum, is_share(max_momentum)),
    )

    def cycle(outer: float, inner: float, after: Schedule) -> Schedule:
        legs = [linear_schedule(outer, inner, first_steps), linear_schedule(inner, outer, back), after]
        return join_schedules(legs, [first_steps, first_steps + back])

    def decay(step: torch.Tensor) -> torch.Tensor:
        return min_value / (1 + decay_rate * step.to(torch.float64).clamp(min=0) / decay_steps)

    def code(part: str) -> str:
        options = {"min_momentum": min_momentum, "max_momentum": max_momentum}
        given = {"decay_rate": decay_rate, "decay_steps": decay_steps, **options}
        return f"{call_code(one_cycle, min_value, max_value, first_steps, second_steps, **given)}.{part}"

    rate = cycle(min_value, max_value, decay)
    momentum = cycle(max_momentum, min_momentum, constant_schedule(max_momentum))
    return OneCycle(CodedSchedule(rate, partial(code, "lr")), CodedSchedule(momentum, partial(code, "momentum")))


@coded_schedule
def lr_range_test_schedule(
    min_value: float = 1e-3, step_size: int = 2000, step_rate: float = 1.0, *, staircase: bool = False
) -> Schedule:
    """``min·(1 + step_rate·i/step_size)``, which rises until training diverges; DeepSpeed's LRRangeTest with its defaults.

    i counts steps from 0; DeepSpeed's ``last_batch_iteration`` is one less. With ``staircase`` the rate rises only every
    ``step_size`` steps.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.lr_range_test_schedule(1e-3, 100)
    >>> [round(float(rate(step)), 4) for step in (0, 100, 200)]
    [0.001, 0.002, 0.003]
    """
    check(
        "lr_range_test_schedule",
        "min_value is above 0, step_size an integer from 1, and step_rate a number",
        min_value=(min_value, is_positive(min_value)),
        step_size=(step_size, is_step(step_size)),
        step_rate=(step_rate, is_number(step_rate)),
    )

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        interval = step / step_size
        return min_value * (1 + step_rate * (interval.floor() if staircase else interval))

    return schedule

"""One-cycle schedules (arXiv 1708.07120), and the learning-rate range test (arXiv 1506.01186)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.ranges import check, is_step
from shardlib.optim.schedules import (
    Schedule,
    constant_schedule,
    join_schedules,
    linear_schedule,
    piecewise_interpolate_schedule,
)


def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Lines from ``peak/div_factor`` up to the peak, back, and down by ``final_div_factor`` once more. As optax's.

    The peak is at ``pct_start`` of ``transition_steps``, the way back ends at ``pct_final``.
    """
    boundaries = {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1 / div_factor,
        transition_steps: 1 / final_div_factor,
    }
    return piecewise_interpolate_schedule("linear", peak_value / div_factor, boundaries)


def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Half cosines from ``peak/div_factor`` to the peak and to ``peak/(div_factor·final_div_factor)``. As optax's."""
    boundaries = {
        int(pct_start * transition_steps): div_factor,
        transition_steps: 1 / (div_factor * final_div_factor),
    }
    return piecewise_interpolate_schedule("cosine", peak_value / div_factor, boundaries)


class OneCycle(NamedTuple):
    """Schedules of the learning rate and of momentum (SGD's, or Adam's b1), in antiphase."""

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
    """The rate rises to ``max_value`` in ``first_steps`` and falls back in ``second_steps`` (by default as many).

    After the cycle it is ``min_value/(1 + decay_rate·i/decay_steps)``, i counted from there. Momentum falls while the rate
    rises. DeepSpeed's OneCycle and its defaults. Momentum reaches an optimizer by `inject_hyperparams`.

    Raises:
        ValueError: a number of steps, or the decay, out of range.
    """
    back = first_steps if second_steps is None else second_steps
    check(
        "one_cycle",
        "steps are integers from 1, and decay_rate is at least 0",
        first_steps=(first_steps, is_step(first_steps)),
        second_steps=(back, is_step(back)),
        decay_steps=(decay_steps, is_step(decay_steps)),
        decay_rate=(decay_rate, decay_rate >= 0),
    )

    def cycle(outer: float, inner: float, after: Schedule) -> Schedule:
        legs = [linear_schedule(outer, inner, first_steps), linear_schedule(inner, outer, back), after]
        return join_schedules(legs, [first_steps, first_steps + back])

    def decay(step: torch.Tensor) -> torch.Tensor:
        return min_value / (1 + decay_rate * step.to(torch.float64).clamp(min=0) / decay_steps)

    return OneCycle(
        cycle(min_value, max_value, decay), cycle(max_momentum, min_momentum, constant_schedule(max_momentum))
    )


def lr_range_test_schedule(
    min_value: float = 1e-3, step_size: int = 2000, step_rate: float = 1.0, *, staircase: bool = False
) -> Schedule:
    """``min·(1 + step_rate·(i + 1)/step_size)``: rises until training diverges. DeepSpeed's LRRangeTest, its defaults.

    With ``staircase`` it rises only every ``step_size`` steps.

    Raises:
        ValueError: ``step_size`` out of range.
    """
    check("lr_range_test_schedule", "steps are integers from 1", step_size=(step_size, is_step(step_size)))

    def schedule(step: torch.Tensor) -> torch.Tensor:
        interval = (step.to(torch.float64) + 1) / step_size
        return min_value * (1 + step_rate * (interval.floor() if staircase else interval))

    return schedule

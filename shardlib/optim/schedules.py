"""Schedules: functions of the step (a 0-d tensor counting from 0) to a 0-d float64 tensor. Names and values are optax's.

A schedule counts updates: a step that is skipped does not advance it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from shardlib.optim.ranges import check, is_step

Schedule = Callable[[torch.Tensor], torch.Tensor]


def constant_schedule(value: float) -> Schedule:
    """``value`` at every step."""
    return lambda step: torch.full_like(step, value, dtype=torch.float64)


def as_schedule(value: float | Schedule) -> Schedule:
    """A number as a schedule; a schedule as it is."""
    return value if callable(value) else constant_schedule(value)


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """``(init − end)·(1 − t)^power + end``, t from 0 to 1 in ``transition_steps`` steps from ``transition_begin`` on.

    Raises:
        ValueError: a number of steps out of range.
    """
    _check_steps("polynomial_schedule", transition_steps=transition_steps)

    def schedule(step: torch.Tensor) -> torch.Tensor:
        left = 1 - _progress(step - transition_begin, transition_steps)
        return (init_value - end_value) * left**power + end_value

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`polynomial_schedule` of power 1."""
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps, transition_begin)


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """``init·decay_rate^(i/transition_steps)``, i counted from ``transition_begin``; never beyond ``end_value``.

    With ``staircase`` the exponent is rounded down. A rate above 1 grows.

    Raises:
        ValueError: ``transition_steps`` or ``decay_rate`` out of range.
    """
    _check_steps("exponential_decay", transition_steps=transition_steps)
    check("exponential_decay", "the rate is above 0", decay_rate=(decay_rate, decay_rate > 0))

    def schedule(step: torch.Tensor) -> torch.Tensor:
        exponent = (step.to(torch.float64) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (exponent.floor() if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """``init·((1 − alpha)·(½ + ½cos πt)^exponent + alpha)``, t from 0 to 1 in ``decay_steps`` (arXiv 1608.03983).

    Raises:
        ValueError: ``decay_steps`` out of range.
    """
    _check_steps("cosine_decay_schedule", decay_steps=decay_steps)

    def schedule(step: torch.Tensor) -> torch.Tensor:
        fall = (0.5 * (1 + torch.cos(math.pi * _progress(step, decay_steps)))) ** exponent
        return init_value * ((1 - alpha) * fall + alpha)

    return schedule


def piecewise_constant_schedule(init_value: float, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """``init_value``, multiplied from each boundary on by its scale."""
    boundaries = sorted(boundaries_and_scales)
    values = accumulate((boundaries_and_scales[at] for at in boundaries), float.__mul__, initial=float(init_value))
    return join_schedules([constant_schedule(value) for value in values], boundaries)


def piecewise_interpolate_schedule(
    interpolate_type: str, init_value: float, boundaries_and_scales: Mapping[int, float]
) -> Schedule:
    """Through what `piecewise_constant_schedule` takes on at each boundary, "linear" or along half a "cosine" between.

    Raises:
        ValueError: an interpolation that is neither, or a boundary below 1.
    """
    if interpolate_type not in ("linear", "cosine"):
        raise ValueError(f"interpolate_type={interpolate_type!r}: use 'linear' or 'cosine'")
    boundaries = sorted(boundaries_and_scales)
    _check_steps("piecewise_interpolate_schedule", **{f"boundary {at}": at for at in boundaries})
    scales = (float(boundaries_and_scales[at]) for at in boundaries)
    values = list(accumulate(scales, float.__mul__, initial=float(init_value)))
    parts: list[Schedule] = []
    for (begin, end), (start, stop) in zip(pairwise([0, *boundaries]), pairwise(values)):
        if interpolate_type == "linear":
            parts.append(linear_schedule(start, stop, end - begin))
        else:
            fall = cosine_decay_schedule(1.0, end - begin)
            parts.append(lambda step, fall=fall, start=start, stop=stop: stop + (start - stop) * fall(step))  # type: ignore[misc]
    return join_schedules([*parts, constant_schedule(values[-1])], boundaries)


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each counts from the boundary where it begins.

    Raises:
        ValueError: not one boundary fewer than schedules, or boundaries that do not rise.
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} boundaries between them, "
            f"not {len(boundaries)}"
        )
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"join_schedules: boundaries {list(boundaries)} do not rise; sort the schedules by their start"
        )

    def schedule(step: torch.Tensor) -> torch.Tensor:
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(step < boundary, value, later(step - boundary))
        return value

    return schedule


def _progress(step: torch.Tensor, steps: int) -> torch.Tensor:
    return (step.to(torch.float64) / steps).clamp(0.0, 1.0)


def _check_steps(what: str, **steps: int) -> None:
    check(what, "steps are integers from 1", **{name: (value, is_step(value)) for name, value in steps.items()})

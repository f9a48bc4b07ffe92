"""Schedules: functions from a step, counted from 0, to a 0-d float64 tensor. Names and values are optax's.

For a tensor or array of steps they return a tensor of the same shape. Step i is the update after i other updates: at step 0 a
schedule has its first value, and a schedule of N steps has its last value at step N. Schedules count updates, so a skipped
step does not advance them. Arguments that take a schedule also take any function from a step (a 0-d float64 tensor) to a
number.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch

from shardlib.common._compat import transformed
from shardlib.optim.checks import check, is_count, is_integer, is_number, is_positive, is_real, is_size, is_step
from shardlib.optim.code import coded_schedule

Schedule = Callable[[Any], Any]

_later: ContextVar[float] = ContextVar("later", default=0.0)


@contextmanager
def later(steps: torch.Tensor | float) -> Iterator[None]:
    """A context in which schedules are so many steps further than the step that they are called with.

    For parameters that missed steps, and so count fewer updates than were made.
    """
    before = _later.set(float(steps))
    try:
        yield
    finally:
        _later.reset(before)


def _steps_later() -> float:
    """How many: a function of the module's, since schedules are pickled with what they name, and a ContextVar cannot be."""
    return _later.get()


def on_numbers(schedule: Schedule) -> Schedule:
    """``schedule`` for any number, tensor or array of steps, returning a float64 tensor of the same shape.

    Raises:
        TypeError: in a call, if the step is not a real number, or ``schedule`` returns something else than a number.
    """

    @functools.wraps(schedule)
    def called(step: Any) -> torch.Tensor:
        at = _numbers(step)
        if at is None:
            raise TypeError(f"a schedule is a function of the step's number, not of {_described(step)}")
        if steps := _steps_later():
            with later(0.0):  # schedules that this one calls are given its step
                given = schedule(at + steps)
        else:
            given = schedule(at)
        value = _numbers(given)
        if value is None or value.shape not in ((), at.shape):
            name = getattr(schedule, "__name__", type(schedule).__name__)
            when = f"step {at.item():g}" if at.dim() == 0 else f"steps of shape {tuple(at.shape)}"
            raise TypeError(f"the schedule {name} gave {_described(given)} at {when}; it must return a number")
        return value.expand(at.shape)

    vars(called)["is_schedule"] = True
    return called


def is_schedule(value: Any) -> bool:
    """Whether a value is what `on_numbers` returns."""
    return isinstance(value, FunctionType) and "is_schedule" in vars(value)


def _numbers(value: Any) -> torch.Tensor | None:
    """Real numbers as a float64 tensor; None for anything else."""
    if isinstance(value, (np.ndarray, np.generic)):
        # A copy, since torch takes no negative strides and warns about read-only arrays.
        value = torch.from_numpy(np.array(value, np.float64, order="C")) if value.dtype.kind in "iuf" else None
    if isinstance(value, torch.Tensor):
        real = value.dtype != torch.bool and not value.is_complex()
        return value.detach().to(torch.float64) if real else None
    return torch.tensor(float(value), dtype=torch.float64) if is_real(value) else None


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{value!r}" if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"


@coded_schedule
def constant_schedule(value: float) -> Schedule:
    """``value`` at every step.

    >>> float(sl.optim.constant_schedule(0.1)(1000))
    0.1
    """
    check("constant_schedule", "it is a number", value=(value, is_number(value)))
    return on_numbers(lambda step: torch.full_like(step, float(value)))


def as_schedule(value: float | Schedule, what: str = "as_schedule", name: str = "lr") -> Schedule:
    """A schedule from argument ``name`` of ``what``: a number of at least 0, a schedule, or a user's function of the step.

    Raises:
        ValueError: ``value`` is none of these.
    """
    if callable(value) and not isinstance(value, type):
        return on_numbers(value)
    number = _numbers(value)
    check(
        what,
        f"{name} is a number, at least 0, or a schedule: a function of the step, such as "
        "sl.optim.cosine_decay_schedule(3e-4, 1000)",
        **{name: (value, number is not None and number.dim() == 0 and is_size(number.item()))},
    )
    assert number is not None
    return constant_schedule(number.item())


@coded_schedule
def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """``(init − end)·(1 − t)^power + end``, with t from 0 to 1 in ``transition_steps`` steps from ``transition_begin`` on.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.polynomial_schedule(1.0, 0.0, 2.0, 10)
    >>> float(rate(5))
    0.25
    """
    _check_steps("polynomial_schedule", transition_steps=transition_steps)
    check(
        "polynomial_schedule",
        "values are numbers, the power is above 0 and transition_begin an integer",
        init_value=(init_value, is_number(init_value)),
        end_value=(end_value, is_number(end_value)),
        power=(power, is_positive(power)),
        transition_begin=(transition_begin, is_integer(transition_begin)),
    )

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        left = 1 - _progress(step - transition_begin, transition_steps)
        return (init_value - end_value) * left**power + end_value

    return schedule


@coded_schedule
def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`polynomial_schedule` of power 1.

    >>> rate = sl.optim.linear_schedule(1.0, 0.0, 10)
    >>> float(rate(5))
    0.5
    """
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps, transition_begin)


@coded_schedule
def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """``init·decay_rate^(i/transition_steps)``, with i counted from ``transition_begin``; never beyond ``end_value``.

    With ``staircase`` the exponent is rounded down. With ``decay_rate`` above 1 the value grows.

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.exponential_decay(1.0, 10, 0.5)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 20)]
    [1.0, 0.5, 0.25]
    """
    _check_steps("exponential_decay", transition_steps=transition_steps)
    check(
        "exponential_decay",
        "values are numbers, decay_rate is above 0 and transition_begin an integer",
        init_value=(init_value, is_number(init_value)),
        decay_rate=(decay_rate, is_positive(decay_rate)),
        transition_begin=(transition_begin, is_integer(transition_begin)),
        end_value=(end_value, end_value is None or is_number(end_value)),
    )

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        exponent = (step.to(torch.float64) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (exponent.floor() if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule


@coded_schedule
def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """``init·((1 − alpha)·(½ + ½cos πt)^exponent + alpha)``, with t from 0 to 1 in ``decay_steps`` (arXiv 1608.03983).

    Raises:
        ValueError: an argument out of range.

    >>> rate = sl.optim.cosine_decay_schedule(1.0, 100)
    >>> [round(float(rate(step)), 3) for step in (0, 50, 100)]
    [1.0, 0.5, 0.0]
    """
    _check_steps("cosine_decay_schedule", decay_steps=decay_steps)
    check(
        "cosine_decay_schedule",
        "init_value and alpha are numbers, the exponent is above 0",
        init_value=(init_value, is_number(init_value)),
        alpha=(alpha, is_number(alpha)),
        exponent=(exponent, is_positive(exponent)),
    )

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        fall = (0.5 * (1 + torch.cos(math.pi * _progress(step, decay_steps)))) ** exponent
        return init_value * ((1 - alpha) * fall + alpha)

    return schedule


@coded_schedule
def piecewise_constant_schedule(init_value: float, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """``init_value`` times the scales of all boundaries that the step has reached.

    Raises:
        ValueError: a boundary that is not an integer from 0, or a value that is not a number.

    >>> rate = sl.optim.piecewise_constant_schedule(1.0, {10: 0.5, 20: 0.5})
    >>> [float(rate(step)) for step in (0, 10, 20)]
    [1.0, 0.5, 0.25]
    """
    boundaries, scales = _boundaries("piecewise_constant_schedule", init_value, boundaries_and_scales)
    values = accumulate(scales, float.__mul__, initial=float(init_value))
    return join_schedules([constant_schedule(value) for value in values], boundaries)


@coded_schedule
def piecewise_interpolate_schedule(
    interpolate_type: str, init_value: float, boundaries_and_scales: Mapping[int, float]
) -> Schedule:
    """The values of `piecewise_constant_schedule` at its boundaries, with interpolation between them.

    Args:
        interpolate_type: "linear", or "cosine" for half a cosine.

    Raises:
        ValueError: another interpolation, or a boundary below 1.

    >>> rate = sl.optim.piecewise_interpolate_schedule("linear", 1.0, {10: 0.5})
    >>> [float(rate(step)) for step in (0, 5, 10)]
    [1.0, 0.75, 0.5]
    """
    if interpolate_type not in ("linear", "cosine"):
        raise ValueError(f"interpolate_type={interpolate_type!r}: use 'linear' or 'cosine'")
    boundaries, scales = _boundaries("piecewise_interpolate_schedule", init_value, boundaries_and_scales)
    _check_steps("piecewise_interpolate_schedule", **{f"boundary {at}": at for at in boundaries})
    values = list(accumulate(scales, float.__mul__, initial=float(init_value)))
    schedules: list[Schedule] = []
    for (begin, end), (start, stop) in zip(pairwise([0, *boundaries]), pairwise(values)):
        if interpolate_type == "linear":
            schedules.append(linear_schedule(start, stop, end - begin))
        else:
            fall = cosine_decay_schedule(1.0, end - begin)
            schedules.append(lambda step, fall=fall, start=start, stop=stop: stop + (start - stop) * fall(step))  # type: ignore[misc]
    return join_schedules([*schedules, constant_schedule(values[-1])], boundaries)


@coded_schedule
def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Several schedules in turn, each of which counts steps from the boundary at which it begins.

    Raises:
        ValueError: the number of boundaries is not one less than that of schedules, or boundaries do not ascend.

    >>> rate = sl.optim.join_schedules([sl.optim.constant_schedule(1.0), sl.optim.constant_schedule(0.1)], [10])
    >>> float(rate(9)), float(rate(10))
    (1.0, 0.1)
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} boundaries between them, "
            f"not {len(boundaries)}"
        )
    check(
        "join_schedules",
        "boundaries are integers from 0",
        **{f"boundary {at}": (at, is_count(at)) for at in boundaries},
    )
    schedules = [as_schedule(each, "join_schedules", "schedule") for each in schedules]
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"join_schedules: boundaries {list(boundaries)} do not rise; sort the schedules by their start"
        )

    @on_numbers
    def schedule(step: torch.Tensor) -> torch.Tensor:
        if not step.dim() and not transformed():  # a user's function may have no value where it does not hold
            number = bisect_right(boundaries, float(step))
            return schedules[number](step - (0, *boundaries)[number])
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(step < boundary, value, later(step - boundary))
        return value

    return schedule


def _boundaries(
    what: str, init_value: float, boundaries_and_scales: Mapping[int, float]
) -> tuple[list[int], list[float]]:
    """The boundaries in ascending order, and their scales. Checks the arguments."""
    check(
        what,
        "init_value and scales are numbers, boundaries integers from 0",
        init_value=(init_value, is_number(init_value)),
        **{f"boundary {at}": (at, is_count(at)) for at in boundaries_and_scales},
        **{f"scale at {at}": (scale, is_number(scale)) for at, scale in boundaries_and_scales.items()},
    )
    boundaries = sorted(boundaries_and_scales)
    return boundaries, [float(boundaries_and_scales[at]) for at in boundaries]


def _progress(step: torch.Tensor, steps: int) -> torch.Tensor:
    """The share of ``steps`` that is done at ``step``, from 0 to 1."""
    return (step.to(torch.float64) / steps).clamp(0.0, 1.0)


def _check_steps(what: str, **steps: int) -> None:
    check(what, "steps are integers from 1", **{name: (value, is_step(value)) for name, value in steps.items()})

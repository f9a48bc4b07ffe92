"""Paces: numbers that change from step to step (rows, lengths, difficulties), as runs of steps that have the same one.

As data, a pace can be compared, summed over any number of steps in one look-up, and inverted. So nothing that depends on it,
such as the tokens that were consumed before a step, is state of its own.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardlib.errors import BatchError
from shardlib.optim.checks import check, is_count, is_integer, is_number, is_positive, is_real, is_step


@dataclass(frozen=True)
class Pace:
    """A function of the step, counted from 0, that keeps its value over each run of steps.

    Attributes:
        starts: the step at which each run begins: 0, and then ascending. The last run has no end.
        values: the value of each run: integers, or floats.
    """

    starts: tuple[int, ...]
    values: tuple[Any, ...]

    def __call__(self, step: Any) -> Any:
        """The value at ``step``; at a tensor of steps, a tensor of values, NaN at steps below 0.

        Raises:
            ValueError: a number below 0.
        """
        if not isinstance(step, torch.Tensor):
            return self.values[self.run_at(step)]
        return self._table(self.values, step)[self._runs_at(step)]

    def total(self, step: Any) -> Any:
        """The sum of the values at all steps before ``step``; for a tensor of steps, a tensor of sums, NaN for those below 0.

        Raises:
            ValueError: a number below 0.
        """
        if not isinstance(step, torch.Tensor):
            run = self.run_at(step)
            return self._sums[run] + (step - self.starts[run]) * self.values[run]
        runs = self._runs_at(step)
        starts, values, sums = (self._table(numbers, step)[runs] for numbers in (self.starts, self.values, self._sums))
        return sums + (step - starts) * values

    def step_at(self, number: int) -> int:
        """The step that has the unit ``number``, where each step has as many units as its value, an integer from 1."""
        run = bisect.bisect_right(self._sums, number) - 1
        return self.starts[run] + (number - self._sums[run]) // self.values[run]

    def end_of_run(self, number: int) -> int | None:
        """The first unit beyond the run that unit ``number`` lies in; None for the last run."""
        run = bisect.bisect_right(self._sums, number)
        return self._sums[run] if run < len(self._sums) else None

    def run_at(self, step: int) -> int:
        """The number of the run that ``step`` lies in.

        Raises:
            ValueError: a number below 0.
        """
        if not step >= 0:
            raise ValueError(f"a pace has no step {step!r}: steps are numbers from 0 on")
        return bisect.bisect_right(self.starts, step) - 1

    @cached_property
    def _sums(self) -> tuple[Any, ...]:
        """The sum of the values before each run."""
        lengths = (end - start for start, end in itertools.pairwise(self.starts))
        return tuple(itertools.accumulate((n * value for n, value in zip(lengths, self.values)), initial=0))

    def _runs_at(self, step: torch.Tensor) -> torch.Tensor:
        """The runs in tables whose first entry is for steps below 0."""
        starts = torch.tensor(self.starts, dtype=torch.float64, device=step.device)
        return torch.searchsorted(starts, step.to(torch.float64), right=True)

    def _table(self, numbers: Sequence[Any], step: torch.Tensor) -> torch.Tensor:
        """NaN, and numbers, on the steps' device, as float64: exact up to 2^53."""
        return torch.tensor((math.nan, *numbers), dtype=torch.float64, device=step.device)


def constant_pace(value: float) -> Pace:
    """``value`` at every step.

    >>> sl.data.constant_pace(64).total(10)
    640
    """
    check("constant_pace", "it is a number", value=(value, is_number(value)))
    return Pace((0,), (value,))


def linear_pace(first: int, last: int, steps: int, multiple: int = 1) -> Pace:
    """From ``first`` up to ``last`` in about ``steps`` steps, in multiples of ``multiple``: `root_pace` of degree 1.

    DeepSpeed's schedule "fixed_linear" (``total_curriculum_step``, ``difficulty_step``). Its first batch is at step 1, and
    here at step 0.

    >>> pace = sl.data.linear_pace(8, 64, steps=10, multiple=8)
    >>> [pace(step) for step in range(12)]
    [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]
    """
    return _rising("linear_pace", first, last, steps, 1.0, multiple)


def root_pace(first: int, last: int, steps: int, degree: float = 2.0, multiple: int = 1) -> Pace:
    """``⌊(step/steps)^(1/degree)·(last − first) + first⌋``, rounded down to a multiple, up to ``last``.

    DeepSpeed's schedule "fixed_root" (arXiv 2108.06084). Values begin at the first multiple from ``first`` on; ``last`` need
    not be a multiple, and comes when the next one would be beyond it, which may be after ``steps``.

    Raises:
        ValueError: an argument out of range; a pace that falls.

    >>> pace = sl.data.root_pace(8, 64, steps=10, multiple=8)
    >>> [pace(step) for step in range(12)]
    [8, 24, 32, 32, 40, 40, 48, 48, 56, 56, 64, 64]
    """
    check("root_pace", "the degree is above 0", degree=(degree, is_positive(degree)))
    return _rising("root_pace", first, last, steps, degree, multiple)


def _rising(what: str, first: int, last: int, steps: int, degree: float, multiple: int) -> Pace:
    check(
        what,
        "values are integers that do not fall; steps and multiple are integers from 1",
        first=(first, is_integer(first)),
        last=(last, is_integer(last) and not (is_integer(first) and last < first)),
        steps=(steps, is_step(steps)),
        multiple=(multiple, is_step(multiple)),
    )
    lowest = -(-first // multiple) * multiple

    def value(step: int) -> int:
        reached = math.floor((step / steps) ** (1.0 / degree) * (last - first) + first)
        return min(max(reached - reached % multiple, lowest), last)

    starts, values = [0], [value(0)]
    while values[-1] < last:
        low, reach = starts[-1], 1
        while value(low + reach) == values[-1]:
            reach *= 2
        later = range(low + 1, low + reach + 1)
        starts.append(later[bisect.bisect_right(later, values[-1], key=value)])
        values.append(value(starts[-1]))
    return Pace(tuple(starts), tuple(values))


def discrete_pace(values: Sequence[float], until: Sequence[int]) -> Pace:
    """Values in turn, each up to and with its step of ``until``; the last one has no end.

    DeepSpeed's schedule "fixed_discrete" (``difficulty``, ``max_step``).

    Raises:
        ValueError: not one step less than values, or steps that do not ascend.

    >>> pace = sl.data.discrete_pace([8, 16, 64], until=[3, 6])
    >>> [pace(step) for step in range(8)]
    [8, 8, 8, 8, 16, 16, 16, 64]
    """
    check(
        "discrete_pace",
        "values are numbers, steps integers from 0",
        **{f"value {value}": (value, is_number(value)) for value in values},
        **{f"step {step}": (step, is_count(step)) for step in until},
    )
    if len(values) != len(until) + 1 or any(after <= step for step, after in itertools.pairwise(until)):
        raise ValueError(
            f"discrete_pace: {len(values)} values until steps {list(until)}: give one step less, in ascending order"
        )
    return _merged([0, *(step + 1 for step in until)], values)


def custom_pace(value: Callable[[int], float], steps: int, most: float | None = None) -> Pace:
    """``value(step)`` at the steps 0 to ``steps``, and the last of these values from then on.

    The function is called for each of them now, and never again.

    Args:
        most: a value that ends the pace where it is reached, as DeepSpeed's ``max_difficulty`` does.

    Raises:
        ValueError: a function that gives no number; names the step.

    >>> pace = sl.data.custom_pace(lambda step: 16 << step // 3, steps=6)
    >>> [pace(step) for step in range(9)]
    [16, 16, 16, 32, 32, 32, 64, 64, 64]
    """
    check("custom_pace", "steps are an integer from 0", steps=(steps, is_count(steps)))
    found: list[float] = []
    for step in range(steps + 1):
        found.append(value(step))
        if not is_number(found[-1]):
            raise ValueError(f"custom_pace: the function gave {found[-1]!r} at step {step}; it must return a number")
        if most is not None and found[-1] >= most:
            found[-1] = most
            break
    return _merged(range(len(found)), found)


def map_paces(value: Callable[..., float], *paces: Pace) -> Pace:
    """``value(a, b, …)`` of the values a, b, … that the paces have at the same step.

    So a step keeps its tokens while its rows become longer:

    >>> lengths = sl.data.discrete_pace([64, 256, 1024], until=[100, 200])
    >>> rows = sl.data.map_paces(lambda length: 65536 // length, lengths)
    >>> rows(0), rows(1000)
    (1024, 64)
    """
    wrong = [repr(pace) for pace in paces if not isinstance(pace, Pace)]
    if wrong or not paces:
        raise BatchError(
            f"map_paces: {', '.join(wrong) or 'no paces'}: give paces behind the function, as sl.data.constant_pace(64)"
        )
    starts = sorted(set().union(*(pace.starts for pace in paces)))
    found = [value(*(pace(start) for pace in paces)) for start in starts]
    wrong = [f"{number!r} at step {start}" for start, number in zip(starts, found) if not is_number(number)]
    if wrong:
        raise ValueError(f"map_paces: the function gave {wrong[0]}; it must return a number")
    return _merged(starts, found)


def as_pace(value: Any, what: str, name: str) -> Pace:
    """A pace of integers from 1 on, from such an integer or a pace. Raises `BatchError` for anything else."""
    pace = Pace((0,), (value,)) if is_real(value) else value
    if not isinstance(pace, Pace):
        raise BatchError(f"{what}: {name}={value!r}: use an integer from 1 on, or a pace (sl.data.linear_pace)")
    for start, number in zip(pace.starts, pace.values):
        if not (is_integer(number) and number >= 1):
            raise BatchError(f"{what}: {name} is {number!r} at step {start}: use integers from 1 on")
    return pace


def _merged(starts: Sequence[int], values: Sequence[Any]) -> Pace:
    """A pace in which no two runs that follow each other have the same value."""
    kept = [run for run, value in enumerate(values) if run == 0 or value != values[run - 1]]
    return Pace(tuple(starts[run] for run in kept), tuple(values[run] for run in kept))

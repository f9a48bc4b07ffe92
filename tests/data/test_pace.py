"""Paces: DeepSpeed's values, and sums and inverses against plain loops."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import BatchError

# (pace, its values at the steps 0, 1, …), measured with DeepSpeed 0.19.8's CurriculumScheduler
DEEPSPEED = [
    (sl.data.linear_pace(8, 64, 10, 8), [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]),
    (sl.data.root_pace(8, 64, 10, 2, 8), [8, 24, 32, 32, 40, 40, 48, 48, 56, 56, 64, 64]),
    (sl.data.linear_pace(8, 60, 10, 16), [16] * 5 + [32] * 3 + [48] * 3 + [60]),
    (sl.data.discrete_pace([8, 16, 64], [3, 6]), [8] * 4 + [16] * 3 + [64] * 3),
]


@pytest.mark.parametrize("pace, values", DEEPSPEED)
def test_deepspeeds_values(pace, values):
    assert [pace(step) for step in range(len(values))] == values


@given(st.integers(0, 40), st.integers(0, 60), st.integers(1, 50), st.sampled_from([0.5, 1, 2, 3]), st.integers(1, 9))
def test_a_rising_pace_is_its_formula(first, more, steps, degree, multiple):
    pace, last = sl.data.root_pace(first, first + more, steps, degree, multiple), first + more
    for step in range(pace.starts[-1] + 5):
        reached = math.floor((step / steps) ** (1 / degree) * more + first)
        assert pace(step) == min(max(reached // multiple * multiple, math.ceil(first / multiple) * multiple), last)
    assert pace.values[-1] == last and len(set(pace.values)) == len(pace.values)


runs_ = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=6)


def pace_of(runs):
    starts = list(accumulate((length for length, _ in runs), initial=0))
    return sl.data.custom_pace(
        lambda step: next(v for start, (n, v) in zip(starts, runs, strict=False) if step < start + n), starts[-1] - 1
    )


@given(runs_)
def test_totals_and_their_inverse(runs):
    pace = pace_of(runs)
    values = [value for length, value in runs for _ in range(length)] + [runs[-1][1]] * 4
    totals = list(accumulate(values, initial=0))
    assert [pace(step) for step in range(len(values))] == values
    assert [pace.total(step) for step in range(len(totals))] == totals
    assert [pace.step_at(unit) for unit in range(totals[-1])] == [s for s, n in enumerate(values) for _ in range(n)]
    steps = torch.arange(len(values)).reshape(1, -1)
    assert pace(steps).tolist() == [values] and pace.total(steps).tolist() == [totals[:-1]]


def test_steps_of_tensors_below_0_have_no_value():
    """A device's steps cannot be refused without waiting for it."""
    pace, steps = sl.data.discrete_pace([1, 2], [3]), torch.tensor([-1.0, 0.0, 5.0])
    assert pace(steps).isnan().tolist() == pace.total(steps).isnan().tolist() == [True, False, False]
    assert pace(steps)[1:].tolist() == [1, 2] and pace.total(steps)[1:].tolist() == [0, 6]


@given(runs_, runs_)
def test_paces_of_paces(one, other):
    a, b = pace_of(one), pace_of(other)
    both = sl.data.map_paces(lambda x, y: 10 * x + y, a, b)
    assert all(both(step) == 10 * a(step) + b(step) for step in range(40))
    assert all(before != after for before, after in zip(both.values, both.values[1:], strict=False))


def test_a_function_is_called_once_a_step_and_sticks_at_its_most():
    called = []
    pace = sl.data.custom_pace(lambda step: called.append(step) or [1, 2, 8, 3, 9][step], 4)
    assert called == [0, 1, 2, 3, 4] and [pace(step) for step in range(7)] == [1, 2, 8, 3, 9, 9, 9]
    stuck = sl.data.custom_pace(lambda step: [1, 2, 8, 3, 9][step], 4, most=7)
    assert [stuck(step) for step in range(6)] == [1, 2, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sl.data.linear_pace(8, 4, 10), r"linear_pace\(last=4\)"),
        (lambda: sl.data.linear_pace(0.5, 4, 0), r"first=0.5, steps=0"),
        (lambda: sl.data.linear_pace("4", 8, 2), r"linear_pace\(first='4'\)"),
        (lambda: sl.data.root_pace(4, None, 2), r"root_pace\(last=None\)"),
        (lambda: sl.data.root_pace(1, 2, 3, degree=0), r"degree=0"),
        (lambda: sl.data.discrete_pace([1, 2], []), "2 values until steps"),
        (lambda: sl.data.discrete_pace([1, 2, 3], [4, 4]), "ascending order"),
        (lambda: sl.data.custom_pace(lambda step: None if step else 1, 3), "gave None at step 1"),
        (lambda: sl.data.map_paces(lambda value: math.inf, sl.data.constant_pace(1)), "gave inf at step 0"),
        (lambda: sl.data.map_paces(max), "map_paces: no paces: give paces"),
        (lambda: sl.data.map_paces(max, 4, sl.data.constant_pace(1)), "map_paces: 4: give paces"),
        (lambda: sl.data.constant_pace(4)(-1), "no step -1: steps are numbers from 0 on"),
        (lambda: sl.data.discrete_pace([1, 2], [3]).total(-2), "no step -2"),
        (lambda: sl.data.constant_pace(4)(math.nan), "no step nan"),
        (lambda: sl.data.curriculum(sl.data.constant_pace(2.5)), "batch is 2.5 at step 0"),
        (lambda: sl.data.curriculum("many"), "batch='many': use an integer from 1 on, or a pace"),
    ],
)
def test_wrong_paces_are_refused(make, message):
    with pytest.raises((ValueError, BatchError), match=message):
        make()

"""Defects that are planted in the library are named by `bisect` where they are, and break a law of `check`.

The mutation's fast part leaves these out: in its copy a defect is there already.
"""

import re

import pytest
from mutation.defects import DEFECTS

import shardlib as sl

from .cases import CASES, CLIPPED, data, found
from .planted import PLANTED
from .planting import planted

FP8 = "fp8, a scale per 32 elements"
FAST = (
    "others' words look up the first row",
    "copy without its dual",
    "a mean over one rank",
    "residual of the first phase forgotten",
)


def check(expected):
    defect = next(defect for defect in DEFECTS if defect.name == expected.name)
    with planted(defect):
        result = found(expected.case)
    finding = result.finding
    assert finding is not None, "nothing found"
    assert re.fullmatch(expected.phase, finding.phase), result
    assert re.search(expected.operation, finding.operation), result
    assert re.search(expected.leaf, finding.leaf), result


@pytest.mark.parametrize("expected", [each for each in PLANTED if each.name in FAST], ids=lambda each: each.name)
def test_some_planted_defects_are_found_where_they_are(expected):
    check(expected)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("expected", PLANTED, ids=lambda each: each.name)
def test_every_planted_defect_is_found_where_it_is(expected):
    check(expected)


def test_there_are_forty_of_them():
    assert len({each.name for each in PLANTED}) == len(PLANTED) >= 40
    assert {each.name for each in PLANTED} <= {defect.name for defect in DEFECTS}
    assert {each.case for each in PLANTED} <= CASES.keys()


def test_what_float64_passes_by_is_found_in_the_plans_own_dtypes():
    (loss_fn, params, batch), plan, optimizer, _steps = data(
        sl.chain(sl.zero(2), sl.quantize(gradients="fp8", block=32))
    )
    defect = next(defect for defect in DEFECTS if defect.name == "the scale of the first block for all")
    with planted(defect):
        result = sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=optimizer, steps=1)
    assert "It does not differ in float64" in result.verdict
    assert "fp8" in result.finding.operation and result.notes == ("in float64, gradients over axis 'data' in " + FP8,)


# Defects of transforms -> the case, the law that they break, and the transform.
BROKEN = {
    "a column layer's input without its pair": ("sliced", "every leaf's gradient", "tensor_slicing"),
    "others' words look up the first row": ("sliced", "the loss function computes", "tensor_slicing"),
    "the window of the next rank": ("sliced", "parameters lie where", "tensor_slicing"),
    "the second reduction left out": ("copied", "every leaf's gradient", "zero(1"),
    "one axis reduced twice": ("copied three times", "every leaf's gradient", "zero(1"),
    "copies counted by every rank": ("copied", "loss and norm", ""),
    "a clip left out of updates by bucket": ("offloaded", "the optimizer's update", ""),
    "parameters that are not put back": ("plain", "stored parameters", "zero(1)"),
    "residual of the first phase forgotten": ("one bit", "every leaf's gradient", "onebit"),
    "experts are summed": ("experts", "every leaf's gradient", "experts"),
    "an all-reduce counted once": ("copied", "a step sends what the plan says", ""),
}
FAST_LAWS = "a column layer's input without its pair", "the second reduction left out", "an all-reduce counted once"


def checked(case):
    if case == "copied three times":
        (loss_fn, params, batch), _, _, _ = CASES["copied"]()
        three = sl.chain(sl.zero(1, axis="a", replicate="b"), sl.zero(0, axis="c"))
        return sl.debug.check(({"a": 2, "b": 2, "c": 2}, three), loss_fn, batch, params=params, optimizer=CLIPPED)
    (loss_fn, params, batch), plan, optimizer, _ = CASES[case]()
    return sl.debug.check(plan, loss_fn, batch, params=params, optimizer=optimizer)


def breaks(name):
    case, law, transform = BROKEN[name]
    with planted(next(defect for defect in DEFECTS if defect.name == name)):
        result = checked(case)
    assert not result, result
    assert result.failures[0].name.startswith(law), result
    assert transform in result.failures[0].remedy, result


@pytest.mark.parametrize("name", FAST_LAWS)
def test_some_defects_of_transforms_break_a_law(name):
    breaks(name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BROKEN)
def test_every_defect_of_a_transform_breaks_its_law(name):
    breaks(name)

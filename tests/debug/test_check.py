"""`check` tests the laws of a plan; what breaks one is named with the leaf, and with the transform that claims it."""

from dataclasses import dataclass

import pytest
import torch
from mutation.defects import DEFECTS

import shardlib as sl
from shardlib.errors import BatchError

from .cases import CASES, CLIPPED, matrices, rules, transformer
from .planting import planted

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
FAST = "a column layer's input without its pair", "the second reduction left out", "an all-reduce counted once"


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


@pytest.mark.parametrize("name", FAST)
def test_some_defects_of_transforms_break_a_law(name):
    breaks(name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BROKEN)
def test_every_defect_of_a_transform_breaks_its_law(name):
    breaks(name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_every_plan_keeps_the_laws(case):
    result = checked(case)
    assert result and len(result.laws) >= 8, result


def test_a_plan_that_keeps_them_says_what_was_compared():
    loss_fn, params, batch = transformer()
    mesh = sl.abstract_mesh(data=2, model=2)
    plan = sl.make_plan(params, mesh, sl.chain(sl.tensor_slicing(rules()), sl.zero(3), sl.precision("bf16")))
    result = sl.debug.check(plan, loss_fn, batch)  # parameters are drawn
    text = str(result)
    assert result and all(law.name in text for law in result.laws)
    assert "29 leaves on 4 ranks" in text and "bytes over 'model'" in text
    assert not result.failures and not result.notes


@dataclass(frozen=True)
class Forgetful(sl.plan.Transform):
    """A user's own transform, which takes a leaf for one that ranks have each for themselves."""

    name = "forgetful()"

    def claims(self, sizes, leaves):
        for leaf in leaves:
            if leaf.path == "layers/0/bias":
                yield sl.plan.Use(leaf.path, varying=("data",))


def test_a_users_own_transform():
    loss_fn, params, batch = matrices()
    result = sl.debug.check(({"data": 2}, sl.chain(sl.zero(0), Forgetful())), loss_fn, batch, params=params)
    (law,) = [law for law in result.failures if law.name.startswith("every leaf")]
    assert law.finding.leaf == "layers/0/bias" and "claimed by forgetful()" in law.remedy, result


def test_a_loss_that_is_drawn_anew_is_told():
    loss_fn, params, batch = matrices()

    def drawn(params, batch):
        return loss_fn(params, batch) * (1 + 0.1 * torch.rand((), dtype=torch.float64, generator=generator))

    generator = torch.Generator().manual_seed(0)
    result = sl.debug.check(({"data": 2}, sl.zero(0)), drawn, batch, params=params)
    assert any("the loss function computes" in law.name for law in result.failures)


def test_wrong_arguments():
    loss_fn, params, batch = matrices()
    with pytest.raises(TypeError, match="give params= with a pair"):
        sl.debug.check(({"data": 2}, sl.zero(1)), loss_fn, batch)
    with pytest.raises(TypeError, match="plan is a str"):
        sl.debug.check("zero", loss_fn, batch, params=params)
    with pytest.raises(BatchError, match="16 rows"):
        sl.debug.check(({"data": 3}, sl.zero(1)), loss_fn, batch, params=params)

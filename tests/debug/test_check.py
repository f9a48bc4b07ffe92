"""`check` tests the laws of a plan; what breaks one is named with the leaf, and with the transform that claims it."""

from dataclasses import dataclass

import pytest
import torch

import shardlib as sl
from shardlib.errors import BatchError, LossError, NonFiniteError, TreeError

from .cases import CASES, matrices, rules, transformer


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_every_plan_keeps_the_laws(case):
    (loss_fn, params, batch), plan, optimizer, _ = CASES[case]()
    result = sl.debug.check(plan, loss_fn, batch, params=params, optimizer=optimizer)
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


def three(step):
    return 3


def test_a_step_sends_what_it_does_not_leave_out():
    loss_fn, params, batch = transformer(layers=3)
    drop = sl.progressive_layer_drop(theta=0.2, gamma=10.0)
    plan = {"data": 2}, sl.chain(sl.zero(3), drop, sl.random_ltd(three))
    result = sl.debug.check(plan, loss_fn, batch, params=params)
    assert result and not result.notes, result


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
    plan = {"data": 2}, sl.zero(1)
    with pytest.raises(TreeError, match=r"check takes whole parameters.* sl\.unshard\(params\)"):
        sl.debug.check(plan, loss_fn, batch, params=sl.shard(params, sl.make_mesh()))
    with pytest.raises(LossError, match="the loss function is a module, Linear"):
        sl.debug.check(plan, torch.nn.Linear(4, 4), batch, params=params)
    with pytest.raises(LossError, match=r"sl\.Mean are 0 in all micro-batches.* give a batch in which"):
        sl.debug.check(plan, lambda p, b: sl.Mean(loss_fn(p, b), 0), batch, params=params)
    params["layers"][1]["bias"][2] = torch.nan
    with pytest.raises(NonFiniteError, match="step 0: the gradient of layers/0/bias is not finite on one device"):
        sl.debug.check(plan, loss_fn, batch, params=params)

"""`check` tests the laws of a plan; what breaks one is named with the leaf, and with the transform that claims it."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

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


def test_what_a_last_stage_returns_beside_the_loss_is_no_payload():
    """It is told to the other stages like the loss, as ranks along other axes tell each other."""

    def last(params, x, batch):
        x = x @ params["w"]
        return x.square().mean(), {"means": x.detach().mean(0)}

    loss_fn = sl.sequential([lambda params, _, batch: batch @ params["w"], last])
    params = [{"w": torch.randn(8, 8)} for _ in range(2)]
    plan = {"data": 2, "pipe": 2}, sl.chain(sl.zero(0), sl.pipeline("1f1b", 2))
    result = sl.debug.check(plan, loss_fn, torch.randn(8, 8), params=params)
    assert result, result


class Barrier(torch.autograd.Function):
    """The identity and a product, of which neither has a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone(), 2 * x

    @staticmethod
    def backward(ctx, dx, _):
        return None


@pytest.mark.parametrize("stage", [0, 3])
def test_what_has_no_gradient_is_no_difference(stage):
    """A leaf that the loss does not use, and what a function of the user's own returns None for."""

    def loss_fn(params, x):
        kept, _ = Barrier.apply((x @ params["w"]).tanh())
        return (x @ params["w"] + kept).square().mean()

    params = {"w": torch.randn(8, 8), "unused": torch.ones(8)}
    result = sl.debug.check(({"data": 2}, sl.zero(stage)), loss_fn, torch.randn(8, 8), params=params)
    assert result, result


@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_gradients_are_compared(stage):
    def loss_fn(params, tokens):
        return (F.embedding(tokens, params["rows"], sparse=True) @ params["w"]).square().mean()

    params, tokens = (
        {"rows": torch.randn(10, 8), "w": torch.randn(8, 8)},
        torch.tensor([[3, 3], [1, 4], [3, 9], [0, 0]]),
    )
    result = sl.debug.check(({"data": 2}, sl.zero(stage)), loss_fn, tokens, params=params)
    assert result, result


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


def test_a_loss_that_takes_apart_what_it_is_given():
    """It is called again and again, each time with all of it."""

    def taking(params, batch):
        params["layers"].reverse()
        params["layers"][0] = params["layers"][0] / 2
        batch["x"] /= 2
        x, y = batch.pop("x"), batch.pop("y")
        for layer in params.pop("layers"):
            x = torch.tanh(x @ layer)
        return (x - y).square().mean()

    params = {"layers": [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]}
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(2)), "y": torch.ones(8, 4)}
    given = {name: rows.clone() for name, rows in batch.items()}
    plan = {"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2))
    result = sl.debug.check(plan, taking, batch, params=params)
    assert result and "not tested" not in str(result), result
    assert "nothing differs" in str(sl.debug.bisect(taking, params, plan, None, batch))
    assert batch.keys() == given.keys() and all(torch.equal(batch[name], rows) for name, rows in given.items())


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


TIED = {"e": torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), "w": torch.ones(10, 8).tril()}


def targets(ignored=True):
    x = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(1))
    y = x.roll(1, 1).clone()
    if ignored:  # of the first rank's twenty targets six count, of the other's fifteen
        y[0] = y[1, 2:] = y[6] = y[2, 1:] = y[3, 0] = -100
    return {"x": x, "y": y}


def of_targets(params, batch, rng=None):
    """A mean over this rank's targets, whatever their number."""
    x = sl.dropout(params["e"][batch["x"]], 0.2, rng) if rng is not None else params["e"][batch["x"]]
    scores = x @ params["w"].T
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch["y"].flatten())


KINDS = {
    "draws nothing": lambda params, batch: of_targets(params, batch),
    "has a key": lambda params, batch, rng: of_targets(params, batch),
    "drops row by row": of_targets,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transforms", [(), (sl.accumulate(2),)])
def test_a_mean_over_different_numbers_of_targets_is_found(kind, transforms):
    """Beside what it does by itself: its gradient over all targets is not the mean over ranks of those over theirs."""
    plan, loss_fn = ({"data": 2}, sl.chain(sl.zero(3), *transforms)), KINDS[kind]
    result = sl.debug.check(plan, loss_fn, targets(), params=TIED)
    (law,) = result.failures
    assert law.name == "micro-batches train as the whole batch does" and "sl.Mean(total, weight)" in str(law), result
    found = sl.debug.bisect(loss_fn, TIED, None, plan, targets())
    assert found.finding == law.finding
    assert sl.debug.check(plan, loss_fn, targets(ignored=False), params=TIED), "as many targets on every rank"


def test_a_mean_by_weights_is_one_over_rows():
    def loss_fn(params, batch, rng):
        scores = (sl.dropout(params["e"][batch["x"]], 0.2, rng) @ params["w"].T).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(scores, batch["y"].flatten(), reduction="sum")
        return sl.Mean(total, (batch["y"] >= 0).sum())

    plan = {"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2))
    result = sl.debug.check(plan, loss_fn, targets(), params=TIED)
    assert result and not result.notes, result


def test_draws_that_are_not_row_by_row_are_told():
    """They are others for micro-batches than for the batch, so that nothing else can be told."""

    def loss_fn(params, batch, rng):
        noise = torch.randn(len(batch["x"]), 5, 8, generator=torch.Generator().manual_seed(rng.seed % 2**62))
        return torch.tanh(params["e"][batch["x"]] + noise).square().mean() + params["w"].sum()

    plan = {"data": 2}, sl.zero(3)
    result = sl.debug.check(plan, loss_fn, targets(), params=TIED)
    (note,) = result.notes
    assert result and "whether the loss function is a mean over rows: it draws" in note
    found = sl.debug.bisect(loss_fn, TIED, None, plan, targets())
    assert not found and found.notes == (note,), found

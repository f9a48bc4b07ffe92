"""Weighted means as losses: no weight, wrong weights, and ranks whose losses differ in kind."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_close, assert_same, copy_of
from oracle import one_device

import shardlib as sl
from shardlib.errors import LossError, NonFiniteError
from shardlib.plan.loss_scale import LossScale

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PARAMS = mlp([6, 9, 4], dtype=torch.float32)[1]
BLOCKS = PARAMS["layers"]
X, Y = regression_batch(8, 6, 4, dtype=torch.float32)


def batch_of(mask):
    return X, Y, torch.tensor(mask, dtype=torch.float32).expand(8).clone()


NOTHING, ALL = batch_of(0.0), batch_of(1.0)


def first(p, x, batch):
    return torch.tanh(F.linear(batch[0], p["weight"], p["bias"]))


def last(p, x, batch):
    rows = (F.linear(x, p["weight"], p["bias"]) - batch[1]).square().mean(1)
    return sl.Mean((rows * batch[2]).sum(), batch[2].sum())


def masked(params, batch):
    one, two = params["layers"]
    return last(two, first(one, None, batch), batch)


PIPED = sl.sequential([first, last])
PLANS = [
    *(sl.zero(stage) for stage in range(4)),
    sl.chain(sl.zero(0), sl.onebit()),
    sl.chain(sl.zero(2), sl.quantize(gradients="int8")),
    sl.chain(sl.zero(0), sl.powersgd(rank=2)),
    sl.chain(sl.zero(2), sl.accumulate(2)),
    sl.chain(sl.zero(1), sl.precision("bf16")),
    sl.chain(sl.zero(3), sl.precision("fp16", loss_scale=LossScale(2.0**8, hysteresis=1))),
]


def trained(mesh, transform, tx, loss_fn=masked, params=PARAMS, **options):
    return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx, **options)


def of(state):
    return copy_of((sl.unshard(state.params), state.opt, state.comm))


# --- nothing weighs ------------------------------------------------------------------------------------------------


def leaves_alone(mesh, transform, tx, loss_fn=masked, params=PARAMS):
    """Checks both policies after a step that leaves momentum and residuals; a later batch with weight trains."""
    state, step = trained(mesh, transform, tx, loss_fn, params, nonfinite="raise", donate=False)
    state, _ = step(state, ALL)
    before = of(state)
    with pytest.raises(LossError, match=r"step 1: the weights of sl.Mean are 0 on all ranks\..*nonfinite='skip'"):
        step(state, NOTHING)
    assert_same(of(state), before)

    state, step = trained(mesh, transform, tx, loss_fn, params, nonfinite="skip")
    state, _ = step(state, ALL)
    scale = state.scale
    state, metrics = step(state, NOTHING)
    assert state.step == 2 and state.scale == scale
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert_same(of(state), before)
    state, metrics = step(state, ALL)
    assert metrics["finite"] and metrics["loss"] > 0
    with pytest.raises(AssertionError):
        assert_same(of(state)[0], before[0])


@pytest.mark.parametrize("transform", PLANS, ids=str)
def test_a_batch_without_weight_changes_nothing(transform):
    sl.simulate(leaves_alone, transform, sl.optim.adamw(1e-2), mesh={"data": 2})


def test_an_optimizer_that_owns_an_axis_handles_a_batch_without_weight():
    for freeze in (1, 5):  # the batch without weight comes in the compressed phase, and before it
        sl.simulate(leaves_alone, sl.zero(0), sl.optim.onebit_adam(1e-2, freeze_step=freeze), mesh={"data": 2})


def test_an_optimizer_that_skips_nonfinite_gradients_handles_a_batch_without_weight():
    sl.simulate(leaves_alone, sl.zero(1), sl.optim.skip_nonfinite(sl.optim.adamw(1e-2), 3), mesh={"data": 2})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_without_weight_changes_nothing(schedule):
    transform = sl.chain(sl.zero(2), sl.pipeline(schedule, 2))
    sl.simulate(leaves_alone, transform, sl.optim.adamw(1e-2), PIPED, BLOCKS, mesh={"data": 2, "pipe": 2})


def test_a_mean_over_no_rows():
    none = tuple(t[:0] for t in ALL)

    def run(mesh):
        state, step = trained(mesh, sl.zero(2), sl.optim.adamw(1e-2), nonfinite="skip")
        before = of(state)
        state, metrics = step(state, none)
        assert metrics["loss"] == 0
        assert_same(of(state), before)

    sl.simulate(run, mesh={"data": 2})


@STAGES
def test_gradients_of_rows_without_weight_are_zero(stage):
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=stage)
        loss, grads = sl.value_and_grad(masked)(params, NOTHING)
        assert loss == 0 and all(not grad.any() for grad in grads.buffers.values())

    sl.simulate(run, mesh={"data": 2})
    loss, grads = sl.value_and_grad(lambda p, b: sl.Mean(p["w"].sum() * torch.nan, 0))({"w": torch.ones(3)}, None)
    assert loss == 0 and torch.equal(grads["w"], torch.zeros(3))


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("zb-h1", 3)])
@pytest.mark.parametrize("stage", [0, 3])
def test_no_rows_on_one_rank_of_a_pipeline(schedule, microbatches, stage):
    def dropped(p, x, batch, rng):
        return last(p, sl.dropout(x, 0.0, rng), batch)

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, microbatches))
        state, step = trained(mesh, transform, training.optimizer(0.5), sl.sequential([first, dropped]), BLOCKS)
        losses = []
        for _ in range(2):
            state, metrics = step(state, ALL if mesh.coords["data"] else tuple(t[:0] for t in ALL))
            losses.append(metrics["loss"].item())
        return losses, sl.unshard(state.params)

    wanted = one_device.train(lambda p, b: oracle({"layers": p}, b), BLOCKS, [ALL, ALL], max_norm=0.5)
    for losses, params in sl.simulate(run, mesh={"data": 2, "pipe": 2}):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert_close(params, wanted[2], 1e-5)


def oracle(params, batch):
    mean = masked(params, batch)
    return mean.total / mean.weight


@STAGES
@pytest.mark.parametrize("extra", [None, sl.accumulate(2)], ids=str)
def test_ranks_and_micro_batches_without_weight_beside_others(stage, extra):
    batches = [
        batch_of([1, 1, 0, 1, 0, 0, 0, 0]),
        batch_of([0, 0, 1, 1, 0, 0, 1, 1]),
        batch_of([1, 0, 0, 0, 0, 0, 0, 0]),
    ]
    transform = sl.zero(stage) if extra is None else sl.chain(sl.zero(stage), extra)
    got = training.simulate({"data": 2}, masked, PARAMS, batches, transform, training.optimizer(0.5))
    wanted = one_device.train(oracle, PARAMS, batches, max_norm=0.5)
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert_close(got[2], wanted[2], 1e-5)


def constant_where_empty(params, batch):
    mean = masked(params, batch)
    return mean if mean.weight else sl.Mean(torch.zeros(()), 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_constant_may_be_returned_for_no_weight(stage):
    """A constant has no gradient; it works where nothing is gathered, once the ranks have agreed on an order."""
    batches = [ALL, batch_of([1, 1, 0, 1, 0, 0, 0, 0]), batch_of([0, 0, 0, 0, 0, 0, 1, 1])]
    got = training.simulate({"data": 2}, constant_where_empty, PARAMS, batches, sl.zero(stage), training.optimizer(0.5))
    wanted = one_device.train(oracle, PARAMS, batches, max_norm=0.5)
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert_close(got[2], wanted[2], 1e-5)


def test_a_constant_in_the_last_stage_of_a_pipeline():
    def constant(p, x, batch):
        mean = last(p, x, batch)
        return mean if mean.weight else sl.Mean(torch.zeros(()), 0)

    batches = [ALL, batch_of([1, 1, 0, 1, 0, 0, 0, 0]), batch_of([0, 0, 0, 0, 0, 0, 1, 1])]
    transform = sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))
    got = training.simulate(
        {"data": 2, "pipe": 2}, sl.sequential([first, constant]), BLOCKS, batches, transform, training.optimizer(0.5)
    )
    wanted = one_device.train(lambda p, b: oracle({"layers": p}, b), BLOCKS, batches, max_norm=0.5)
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert_close(got[2], wanted[2], 1e-5)


def test_evaluation_without_weight():
    def scores(params, batch):
        return {"loss": masked(params, batch), "rows": sl.Mean(batch[0].sum(), len(batch[0])), "x": batch[0]}

    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=2)
        result = sl.make_eval_step(scores, params)(params, NOTHING)
        assert result["loss"].isnan() and result["rows"] == pytest.approx(X.mean().item() * 6, rel=1e-5)
        alone = sl.make_eval_step(masked, params)
        mine = [NOTHING, ALL if mesh.rank else NOTHING]
        assert alone.over(params, mine) == pytest.approx(oracle(PARAMS, ALL).item(), rel=1e-5)
        with pytest.raises(LossError, match=r"^the result: weight 0 on all ranks"):
            alone(params, NOTHING)
        with pytest.raises(LossError, match=r"^the result: weight 0 on all ranks"):
            alone.over(params, [NOTHING, NOTHING])

    sl.simulate(run, mesh={"data": 2})


def test_a_mean_without_weight_beside_the_loss_is_nan():
    def loss_fn(params, batch):
        return F.mse_loss(first(params["layers"][0], None, batch), torch.zeros(len(batch[0]), 9)), {
            "none": sl.Mean(3.0, 0),
            "some": sl.Mean(torch.tensor(3.0), len(batch[0])),
        }

    def run(mesh):
        state, step = trained(mesh, sl.zero(1), sl.optim.sgd(0.1), loss_fn)
        return step(state, share(ALL, mesh.rank, 2))[1]["aux"]

    for aux in sl.simulate(run, mesh={"data": 2}):
        assert aux["none"].isnan() and aux["some"] == 6 / 8


# --- weights that are wrong ----------------------------------------------------------------------------------------


def refused(make, batch, error, match, mesh=None):
    """Told on every rank alike; nothing changes."""

    def run(mesh):
        state, step = make(mesh)
        before = of(state)
        with pytest.raises(error, match=match) as caught:
            step(state, batch(mesh))
        assert_same(of(state), before)
        return str(caught.value)

    messages = sl.simulate(run, mesh=mesh or {"data": 2})
    assert len(set(messages)) == 1
    return messages[0]


def weighing(weight, total=1.0):
    """A loss whose weight is what the batch says."""

    def loss_fn(params, batch):
        return sl.Mean(masked(params, batch).total * total, weight(batch))

    return loss_fn


SECOND_NEGATIVE = lambda mesh: batch_of(1.0 if mesh.coords["data"] == 0 else -0.5)  # noqa: E731


@STAGES
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_negative_weight_is_refused_on_every_rank(stage, policy):
    refused(
        lambda mesh: trained(mesh, sl.zero(stage), sl.optim.adamw(1e-2), nonfinite=policy),
        SECOND_NEGATIVE, LossError, r"rank 1: a negative weight of sl.Mean; weights are counts",
    )  # fmt: skip


def test_a_negative_weight_in_one_micro_batch_and_in_a_pipeline():
    one = lambda mesh: batch_of([1, 1, 1, 1, -1, 0, 0, 0])  # noqa: E731
    transform = sl.chain(sl.zero(1), sl.accumulate(2))
    refused(lambda mesh: trained(mesh, transform, sl.optim.sgd(0.1)), one, LossError, "rank 0: a negative weight")
    transform = sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))
    message = refused(
        lambda mesh: trained(mesh, transform, sl.optim.sgd(0.1), PIPED, BLOCKS), SECOND_NEGATIVE, LossError,
        "negative weight", mesh={"data": 2, "pipe": 2},
    )  # fmt: skip
    assert message.count("negative") == 1  # of the one rank that has a loss and a negative weight


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite(weight):
    loss_fn = weighing(lambda batch: weight)
    refused(
        lambda mesh: trained(mesh, sl.zero(2), sl.optim.adamw(1e-2), loss_fn), lambda mesh: ALL, NonFiniteError,
        rf"step 0: the weight of sl.Mean \({weight}\) is not finite",
    )  # fmt: skip

    def run(mesh):  # no overflow: the scale of the loss has no part in it
        state, step = trained(
            mesh,
            sl.chain(sl.zero(2), sl.precision("fp16", loss_scale=LossScale(2.0**8, hysteresis=1))),
            sl.optim.adamw(1e-2),
            loss_fn,
        )
        before, scale = of(state), state.scale
        state, metrics = step(state, ALL)
        assert not metrics["finite"] and state.scale == scale
        assert_same(of(state), before)

    sl.simulate(run, mesh={"data": 2})


@STAGES
def test_a_weight_too_small_to_divide_by(stage):
    smallest = weighing(lambda batch: 1e-40, total=1e-40)
    for policy in ("raise", "skip"):
        refused(
            lambda mesh: trained(mesh, sl.zero(stage), sl.optim.sgd(0.1), smallest, nonfinite=policy),  # noqa: B023
            lambda mesh: ALL, LossError,
            r"the weights of sl.Mean sum to 2e-40, .* Scale total and weight alike",
        )  # fmt: skip


def test_a_small_weight_that_can_be_divided_by():
    """The remedy of the refusal multiplies both by one number."""

    def run(mesh):
        plain, _ = sl.value_and_grad(weighing(lambda batch: 8))(sl.shard(PARAMS, mesh, stage=1), ALL)
        small, _ = sl.value_and_grad(weighing(lambda batch: 8e-30, total=1e-30))(sl.shard(PARAMS, mesh, stage=1), ALL)
        assert small.item() == pytest.approx(plain.item(), rel=1e-5)

    sl.simulate(run, mesh={"data": 2})


def test_a_quotient_beyond_its_dtype():
    loss_fn = weighing(lambda batch: 1e-30, total=1e12)
    refused(
        lambda mesh: trained(mesh, sl.zero(1), sl.optim.sgd(0.1), loss_fn), lambda mesh: ALL, NonFiniteError,
        r"the gradient's norm \(\d.*e\+\d+, in its dtype\) is not finite",
    )  # fmt: skip


@STAGES
def test_a_mean_over_nothing_times_its_number(stage):
    """The mean of torch over rows that are all masked, on one rank or in one micro-batch, and the remedy, a sum."""

    def of_reduction(reduction):
        def loss_fn(params, batch):
            one, two = params["layers"]
            scores = F.linear(first(one, None, batch), two["weight"], two["bias"])
            count = (batch[2] != 0).sum()
            targets = torch.where(batch[2] != 0, 1, -100)
            loss = F.cross_entropy(scores, targets, reduction=reduction)
            return sl.Mean(loss * count if reduction == "mean" else loss, count)

        return loss_fn

    transform = sl.chain(sl.zero(stage), sl.accumulate(2))
    part = batch_of([1, 1, 1, 1, 0, 0, 0, 0])
    refused(
        lambda mesh: trained(mesh, transform, sl.optim.sgd(0.1), of_reduction("mean")),
        lambda mesh: part if mesh.rank else ALL, NonFiniteError,
        r"The total of a sl.Mean of weight 0 is not finite: take a sum \(reduction='sum'\)",
    )  # fmt: skip

    def run(mesh):
        state, step = trained(mesh, transform, sl.optim.sgd(0.1), of_reduction("sum"))
        return step(state, part if mesh.rank else ALL)[1]["loss"].item()

    total = of_reduction("sum")(PARAMS, tuple(torch.cat([a, b[:4]]) for a, b in zip(ALL, part)))
    assert sl.simulate(run, mesh={"data": 2}) == [pytest.approx((total.total / 12).item(), rel=1e-5)] * 2


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_depends_on_parameters(stage, ranks):
    def learned(params, batch):
        return sl.Mean(masked(params, batch).total, params["layers"][1]["bias"].exp().sum())

    refused(
        lambda mesh: trained(mesh, sl.zero(stage), sl.optim.sgd(0.1), learned), lambda mesh: ALL, LossError,
        r"the weight of sl.Mean requires .* Pass weight.detach\(\), or return total / weight", mesh={"data": ranks},
    )  # fmt: skip


@STAGES
def test_the_remedy_for_a_learned_weight_works(stage):
    def weight(params):
        return params["layers"][1]["bias"].exp().sum()

    def detached(params, batch):
        return sl.Mean(masked(params, batch).total, weight(params).detach())

    def quotient(params, batch):
        return masked(params, batch).total / weight(params)

    def constant(params, batch):
        return masked(params, batch).total / weight(params).detach()

    for loss_fn, wanted in ((detached, constant), (quotient, quotient)):
        got = training.simulate({"data": 2}, loss_fn, PARAMS, [ALL], sl.zero(stage), training.optimizer())
        one = one_device.train(lambda p, b, fn=wanted: sum(fn(p, share(b, r, 2)) for r in (0, 1)) / 2, PARAMS, [ALL])
        assert got[:2] == (pytest.approx(one[0], rel=1e-5), pytest.approx(one[1], rel=1e-5))


# --- losses of different kinds -------------------------------------------------------------------------------------


def of_kind(kind):
    """A mean where ``kind(batch)`` says so, else a scalar of the same value."""

    def loss_fn(params, batch):
        mean = masked(params, batch)
        return mean if kind(batch) else mean.total / mean.weight

    return loss_fn


@STAGES
def test_a_mean_on_one_rank_and_a_scalar_on_another(stage):
    def make(mesh):
        return trained(mesh, sl.zero(stage), sl.optim.sgd(0.1), of_kind(lambda batch: mesh.rank != 1))

    message = refused(make, lambda mesh: ALL, LossError, "the ranks' results differ in form", mesh={"data": 3})
    assert "rank 0, 2: sl.Mean as the loss" in message and "rank 1: a scalar as the loss" in message

    def run(mesh):
        loss_fn = of_kind(lambda batch: mesh.rank == 0)
        with pytest.raises(LossError, match="differ in form"):
            sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, stage=stage), ALL)

    sl.simulate(run, mesh={"data": 2})


@STAGES
def test_a_mean_in_one_micro_batch_and_a_scalar_in_another(stage):
    transform = sl.chain(sl.zero(stage), sl.accumulate(2))
    loss_fn = of_kind(lambda batch: batch[2].sum() == 4)
    refused(
        lambda mesh: trained(mesh, transform, sl.optim.sgd(0.1), loss_fn),
        lambda mesh: batch_of([1, 1, 1, 1, 1, 0, 0, 1]) if mesh.rank else ALL, LossError,
        "rank 1: sl.Mean as the loss in one micro-batch and a scalar as the loss in another",
    )  # fmt: skip


def test_kinds_of_losses_that_differ_in_a_pipeline():
    def ends(p, x, batch):
        mean = last(p, x, batch)
        return mean if mean.weight == batch[2].numel() else mean.total / mean.weight

    transform = sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))

    def make(mesh):
        return trained(mesh, transform, sl.optim.sgd(0.1), sl.sequential([first, ends]), BLOCKS)

    mesh = {"data": 2, "pipe": 2}
    other = batch_of([1, 0, 1, 1, 1, 0, 1, 1])
    message = refused(make, lambda mesh: other if mesh.coords["data"] else ALL, LossError, "differ in form", mesh=mesh)
    assert message.count("as the loss\n") == 2  # of the ranks with the last stage
    mixed = batch_of([1, 0, 1, 1, 1, 1, 1, 1])
    refused(make, lambda mesh: mixed, LossError, "in one micro-batch and", mesh=mesh)


def kinds_in_a_process(mesh, stage):
    state, step = trained(mesh, sl.zero(stage), sl.optim.sgd(0.1), of_kind(lambda batch: mesh.rank == 0))
    step(state, ALL)


def test_kinds_of_losses_that_differ_in_real_processes(pool):
    for outcome in pool.outcomes(kinds_in_a_process, 2, mesh={"data": 2}):
        assert isinstance(outcome[1], LossError) and "rank 1: a scalar as the loss" in str(outcome[1])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_whose_loss_is_constant_is_named_with_the_way(stage, caplog):
    """Which works: `sl.Mean(0, 0)` of plain numbers, where parameters at the top of the tree are a unit without a name."""

    def run(mesh, mean):
        def loss_fn(params, batch):
            if not batch.any():
                return sl.Mean(0, 0) if mean else torch.zeros(())
            loss = (params["w"] * batch).sum()
            return sl.Mean(loss, 1) if mean else loss

        params = sl.shard({"w": torch.ones(4)}, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
        return float(sl.value_and_grad(loss_fn)(params, torch.full((2, 1), float(mesh.rank)))[0])

    with pytest.raises(LossError, match=r"of rank 0, micro-batch 1 of 2, does not .* returns sl\.Mean\(0, 0\)"):
        sl.simulate(run, False, mesh={"data": 2})
    assert sl.simulate(run, True, mesh={"data": 2}) == [4.0, 4.0]
    assert not [record.message for record in caplog.records if "use :" in record.message]

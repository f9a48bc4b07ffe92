"""Schedules of learning rates: against closed forms, torch's schedulers and published values."""

import math

import numpy as np
import pytest
import torch
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_close
from torch.optim import lr_scheduler

import shardlib as sl
from shardlib.optim.schedules import base as schedules


def at(schedule, step):
    value = schedule(torch.tensor(float(step)))
    assert value.dtype == torch.float64 and value.dim() == 0
    return value.item()


def cosine(progress):
    return (1 + math.cos(math.pi * min(max(progress, 0), 1))) / 2


def ramp(step, begin, steps):
    return min(max((step - begin) / steps, 0), 1)


CLOSED_FORMS = {
    "constant": (schedules.constant_schedule(0.3), lambda i: 0.3),
    "number": (schedules.as_schedule(0.3), lambda i: 0.3),
    "linear": (schedules.linear_schedule(0.5, 0.1, 20, 3), lambda i: 0.5 - 0.4 * ramp(i, 3, 20)),
    "polynomial": (
        schedules.polynomial_schedule(0.5, 0.1, 1.7, 20, 3),
        lambda i: 0.4 * (1 - ramp(i, 3, 20)) ** 1.7 + 0.1,
    ),
    "exponential": (schedules.exponential_decay(0.5, 8, 0.7, 2), lambda i: 0.5 * 0.7 ** (max(i - 2, 0) / 8)),
    "staircase": (
        schedules.exponential_decay(0.5, 8, 0.7, staircase=True, end_value=0.2),
        lambda i: max(0.5 * 0.7 ** (i // 8), 0.2),
    ),
    "growth": (
        schedules.exponential_decay(0.01, 8, 2.0, end_value=0.2),
        lambda i: 0.01 * (2 ** (i / 8) if i < 35 else 20),
    ),
    "cosine": (
        schedules.cosine_decay_schedule(0.5, 30, alpha=0.1, exponent=1.5),
        lambda i: 0.5 * (0.9 * cosine(i / 30) ** 1.5 + 0.1),
    ),
    "piecewise constant": (
        schedules.piecewise_constant_schedule(0.5, {20: 0.1, 6: 0.4}),
        lambda i: 0.5 if i < 6 else 0.2 if i < 20 else 0.02,
    ),
    "piecewise linear": (
        schedules.piecewise_interpolate_schedule("linear", 0.5, {6: 0.4, 20: 0.1}),
        lambda i: 0.5 - 0.3 * ramp(i, 0, 6) - 0.18 * ramp(i, 6, 14),
    ),
    "piecewise cosine": (
        schedules.piecewise_interpolate_schedule("cosine", 0.5, {6: 0.4, 20: 0.1}),
        lambda i: 0.2 + 0.3 * cosine(i / 6) if i < 6 else 0.02 + 0.18 * cosine((i - 6) / 14),
    ),
    "joined": (
        schedules.join_schedules([schedules.linear_schedule(0.0, 1.0, 10)] * 3, [4, 9]),
        lambda i: (i if i < 4 else i - 4 if i < 9 else min(i - 9, 10)) / 10,
    ),
    "warm-up": (
        sl.optim.warmup_constant_schedule(0.1, 0.5, 8),
        lambda i: 0.1 + 0.4 * ramp(i, 0, 8),
    ),
    "no warm-up": (sl.optim.warmup_linear_decay_schedule(0.1, 0.5, 0, 8), lambda i: 0.5 * (1 - ramp(i, 0, 8))),
    "warm-up in logarithms": (  # DeepSpeed's WarmupLR
        sl.optim.warmup_constant_schedule(0.1, 0.5, 8, warmup="log"),
        lambda i: 0.1 + 0.4 * (math.log(i + 1) / math.log(8) if i < 8 else 1),
    ),
    "warm-up and line": (  # DeepSpeed's WarmupDecayLR
        sl.optim.warmup_linear_decay_schedule(0.1, 0.5, 8, 30, warmup="log"),
        lambda i: 0.1 + 0.4 * math.log(i + 1) / math.log(8) if i < 8 else 0.5 * max(0, (30 - i) / (30 - 8)),
    ),
    "warm-up and cosine": (
        sl.optim.warmup_cosine_decay_schedule(0.1, 0.5, 8, 30, 0.05, 1.5),
        lambda i: 0.1 + 0.4 * i / 8 if i < 8 else 0.45 * cosine((i - 8) / 22) ** 1.5 + 0.05,
    ),
    "warm-up and exponential": (
        sl.optim.warmup_exponential_decay_schedule(0.0, 0.5, 8, 5, 0.6, 2, True, 0.1),
        lambda i: 0.5 * i / 8 if i < 8 else max(0.1, 0.5 * 0.6 ** (max(i - 10, 0) // 5)),
    ),
    "warm-up, stable, decay": (
        sl.optim.warmup_stable_decay_schedule(0.0, 0.5, 8, 10, 20, 0.1, 2.0),
        lambda i: 0.5 * i / 8 if i < 8 else 0.1 + 0.4 * (1 - ramp(i, 18, 20)) ** 2,
    ),
    "one cycle": (
        sl.optim.one_cycle(0.1, 0.5, 10, 16, decay_rate=0.5, decay_steps=4).lr,
        lambda i: 0.1 + 0.4 * (ramp(i, 0, 10) - ramp(i, 10, 16)) if i < 26 else 0.1 / (1 + 0.5 * (i - 26) / 4),
    ),
    "one cycle's momentum": (
        sl.optim.one_cycle(0.1, 0.5, 10).momentum,
        lambda i: 0.9 - 0.1 * (ramp(i, 0, 10) - ramp(i, 10, 10)),
    ),
    "linear one-cycle": (
        sl.optim.linear_onecycle_schedule(40, 0.5, 0.25, 0.5, 10.0, 100.0),
        lambda i: 0.05 + 0.45 * ramp(i, 0, 10) - 0.45 * ramp(i, 10, 10) - 0.0495 * ramp(i, 20, 20),
    ),
    "range test": (sl.optim.lr_range_test_schedule(0.01, 4, 0.5), lambda i: 0.01 * (1 + 0.5 * i / 4)),
    "range test in steps": (
        sl.optim.lr_range_test_schedule(0.01, 4, 0.5, staircase=True),
        lambda i: 0.01 * (1 + 0.5 * (i // 4)),
    ),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form(name):
    ours, formula = CLOSED_FORMS[name]
    for step in [*range(50), 10**6]:
        assert at(ours, step) == pytest.approx(formula(step), rel=1e-12, abs=1e-15), step


# What the step after the n-th sees, n = 0, 1, ...: torch's schedulers count likewise.
BY_TORCH = {
    "linear": (schedules.linear_schedule(1.0, 0.2, 10), lambda tx: lr_scheduler.LinearLR(tx, 1.0, 0.2, total_iters=10)),
    "cosine": (
        schedules.cosine_decay_schedule(1.0, 25, alpha=0.2),
        lambda tx: lr_scheduler.CosineAnnealingLR(tx, 25, eta_min=0.2),
    ),
    "polynomial": (
        schedules.polynomial_schedule(1.0, 0.0, 2.0, 10),
        lambda tx: lr_scheduler.PolynomialLR(tx, total_iters=10, power=2.0),
    ),
    "exponential": (schedules.exponential_decay(1.0, 1, 0.9), lambda tx: lr_scheduler.ExponentialLR(tx, 0.9)),
    "piecewise": (
        schedules.piecewise_constant_schedule(1.0, {5: 0.1, 9: 0.1}),
        lambda tx: lr_scheduler.MultiStepLR(tx, [5, 9], gamma=0.1),
    ),
    "joined": (
        schedules.join_schedules([schedules.exponential_decay(1.0, 1, 0.9), schedules.constant_schedule(0.5)], [7]),
        lambda tx: lr_scheduler.SequentialLR(
            tx, [lr_scheduler.ExponentialLR(tx, 0.9), lr_scheduler.ConstantLR(tx, 0.5, 100)], [7]
        ),
    ),
    # torch counts the last step as part of the cycle: its phases end at n·pct_start − 1 and n − 1.
    "one-cycle": (
        sl.optim.cosine_onecycle_schedule(20, 1.0, 0.25),
        lambda tx: lr_scheduler.OneCycleLR(tx, 1.0, total_steps=21, pct_start=6 / 21, cycle_momentum=False),
    ),
    "one cycle with momentum": (
        sl.optim.one_cycle(0.1, 1.0, 6, 14, min_momentum=0.85, max_momentum=0.95),
        lambda tx: lr_scheduler.CyclicLR(tx, 0.1, 1.0, 6, 14, base_momentum=0.85, max_momentum=0.95),
    ),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_as_torchs_scheduler(name):
    ours, theirs = BY_TORCH[name]
    tx = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0, momentum=0.9)
    scheduler = theirs(tx)
    for step in range(20):
        group = tx.param_groups[0]
        rate, momentum = ours if isinstance(ours, tuple) else (ours, None)
        assert at(rate, step) == pytest.approx(group["lr"], rel=1e-9, abs=1e-15)
        if momentum is not None:
            assert at(momentum, step) == pytest.approx(group["momentum"], rel=1e-9)
        tx.step()
        scheduler.step()


def test_deepspeeds_defaults():
    test = sl.optim.lr_range_test_schedule()
    assert [at(test, step) for step in (0, 1000, 2000, 4000)] == pytest.approx([1e-3, 1.5e-3, 2e-3, 3e-3])
    cycle = sl.optim.one_cycle(1e-4, 1e-3)
    assert [at(cycle.lr, step) for step in (0, 2000, 4000, 5000)] == pytest.approx([1e-4, 1e-3, 1e-4, 1e-4])
    assert [at(cycle.momentum, step) for step in (0, 1000, 2000, 4000)] == pytest.approx([0.9, 0.85, 0.8, 0.9])
    warm = sl.optim.warmup_cosine_decay_schedule(0.0, 1.0, 1000, 10000, 1e-4, warmup="log")
    assert [at(warm, step) for step in (0, 9, 99, 999)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert at(warm, 10000) == pytest.approx(1e-4)


NUMBERS = {
    "int": 3, "float": 3.0, "NumPy's int": np.int64(3), "NumPy's float": np.float32(3), "array": np.array(3),
    "tensor": torch.tensor(3.0), "int tensor": torch.tensor(3), "in 16 bits": torch.tensor(3, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("step", NUMBERS.values(), ids=NUMBERS)
def test_every_schedule_takes_any_number(step):
    ours = [schedule for schedule, _ in CLOSED_FORMS.values()]
    for schedule in [*ours, *sl.optim.one_cycle(0.1, 0.5, 2), sl.optim.cosine_onecycle_schedule(9, 0.5)]:
        value = schedule(step)
        assert value.dtype == torch.float64 and value.dim() == 0
        assert value.item() == at(schedule, 3)


@pytest.mark.parametrize("steps", [torch.arange(30.0), np.arange(30), np.arange(30)[::-1], torch.arange(30).view(5, 6)])
def test_a_table_of_steps_is_asked_at_once(steps):
    for name, (schedule, _) in CLOSED_FORMS.items():
        found = schedule(steps)
        assert found.dtype == torch.float64 and found.shape == steps.shape
        assert found.flatten().tolist() == [at(schedule, step) for step in steps.flatten().tolist()], name


GIVEN = {
    "int": lambda step: 1,
    "float": lambda step: 0.1 if step < 1 else 0.2,
    "math": lambda step: math.cos(step) + 1.5,
    "NumPy": lambda step: np.interp(float(step), [0, 10], [0.1, 0.2]),
    "NumPy's of the tensor": lambda step: np.exp(-step.numpy()),
    "array": lambda step: np.array(0.5, dtype=np.float32),
    "tensor": lambda step: torch.tensor(0.5),
    "table": lambda step: [0.1, 0.2, 0.3, 0.2, 0.1][int(step)],
}


@pytest.mark.parametrize("rate", GIVEN.values(), ids=GIVEN)
def test_a_users_function_may_give_any_number(rate):
    o = sl.optim
    makers = {
        "sgd": o.sgd, "adam": o.adam, "adamw": o.adamw, "adamw8bit": o.adamw8bit, "lion": o.lion, "lamb": o.lamb,
        "adagrad": o.adagrad, "rmsprop": o.rmsprop, "adafactor": o.adafactor, "muon": o.muon,
        "1-bit Adam": lambda lr: o.onebit_adam(lr, 1), "1-bit LAMB": lambda lr: o.onebit_lamb(lr, 1),
        "0/1 Adam": lambda lr: o.zero_one_adam(lr, 1), "auto": lambda lr: o.onebit_adam(lr, "auto", b2=0.0),
        "from torch": lambda lr: o.from_torch(torch.optim.NAdam, lr=lr), "injected": o.inject_hyperparams(o.adamw),
        "joined": lambda lr: o.sgd(o.join_schedules([lr], [])),
    }  # fmt: skip
    steps = torch.arange(5, dtype=torch.float64)
    table = torch.tensor([float(rate(step)) for step in steps], dtype=torch.float64)
    for name, make in makers.items():
        results = []
        for lr in (rate, lambda step, table=table: table[int(step)]):
            tx, params = make(lr), {"w": torch.linspace(-1, 1, 6).view(2, 3)}
            state = tx.init(params)
            for _ in range(3):
                state = tx.apply(params, {"w": params["w"] ** 3}, state)
            results.append(params["w"])
        assert torch.equal(*results), name


@pytest.mark.parametrize("stage", [0, 3])
def test_a_users_function_trains_on_a_mesh(stage):
    loss_fn, params = mlp([6, 9, 4])
    batch = regression_batch(6, 6, 4)

    def run(mesh, rate):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=stage), sl.optim.sgd(rate))
        return sl.unshard(step(state, share(batch, mesh.rank, 2))[0].params)

    ours, theirs = (sl.simulate(run, rate, mesh={"data": 2})[0] for rate in (lambda step: 0.1, 0.1))
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant_schedule(1.0)([3]), r"a function of the step's number, not of \[3\]"),
        (lambda: schedules.constant_schedule(1.0)(torch.ones(2, dtype=torch.bool)), r"not of a Tensor of shape \(2,\)"),
        (lambda: schedules.constant_schedule(1.0)(np.array("3")), r"not of a ndarray"),
        (
            lambda: schedules.as_schedule(lambda step: None)(3),
            r"the schedule <lambda> gave None at step 3; it must return a",
        ),
        (lambda: schedules.as_schedule(lambda step: torch.ones(1))(0), r"gave a Tensor of shape \(1,\) at step 0"),
        (lambda: schedules.as_schedule(lambda step: True)(0), r"gave True at step 0"),
    ],
)
def test_schedules_must_return_numbers(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_joined_function_is_asked_where_it_holds_alone():
    """Before that 1 + i is negative, and after it the table has ended."""
    joined = sl.optim.join_schedules([lambda i: [0.0, 0.25, 0.5, 0.75][int(i)], lambda i: 1 / math.sqrt(1 + i)], [4])
    assert [float(joined(i)) for i in (0, 2, 3, 4, 7)] == [0.0, 0.5, 0.75, 1.0, 0.5]


def test_larger_batches():
    # Goyal et al. train ResNet-50 with 8192 images at a rate of 3.2, where 256 take 0.1.
    assert sl.optim.linear_scaling(0.1, 8192, 256) == pytest.approx(3.2)
    # You et al., table of BERT: 5e-4·√8 for eight times the batch.
    assert sl.optim.sqrt_scaling(5e-4, 4096, 512) == pytest.approx(5e-4 * 2**1.5)
    with pytest.raises(ValueError, match=r"batches of 0 and 8 rows"):
        sl.optim.sqrt_scaling(0.1, 0, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10), r"10 of 10 steps cannot be warm-up"),
        (lambda: sl.optim.warmup_linear_decay_schedule(0.0, 1.0, -1, 10), r"-1 of 10 steps cannot be warm-up"),
        (lambda: sl.optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 10), r"a schedule that decays needs a peak"),
        (lambda: sl.optim.warmup_constant_schedule(0.0, 1.0, 2, warmup="square"), r"use 'linear' or 'log'"),
        (lambda: sl.optim.warmup_constant_schedule(0.0, 1.0, 1, warmup="log"), r"use at least 2"),
        (lambda: sl.optim.linear_schedule(0.0, 1.0, 0), r"transition_steps=0"),
        (lambda: sl.optim.cosine_decay_schedule(1.0, 2.5), r"decay_steps=2.5"),
        (lambda: sl.optim.exponential_decay(1.0, 5, 0.0), r"decay_rate=0.0"),
        (lambda: sl.optim.join_schedules([schedules.constant_schedule(1.0)], [3]), r"1 schedules need 0 boundaries"),
        (lambda: sl.optim.join_schedules([schedules.constant_schedule(1.0)] * 3, [3, 3]), r"\[3, 3\] do not rise"),
        (lambda: sl.optim.piecewise_interpolate_schedule("cubic", 1.0, {3: 0.1}), r"use 'linear' or 'cosine'"),
        (lambda: sl.optim.piecewise_interpolate_schedule("linear", 1.0, {0: 0.1}), r"boundary 0=0"),
        (lambda: sl.optim.one_cycle(0.1, 1.0, 0), r"first_steps=0, second_steps=0"),
        (lambda: sl.optim.lr_range_test_schedule(step_size=0), r"step_size=0"),
        (lambda: sl.optim.constant_schedule(math.nan), r"value=nan"),
        (lambda: sl.optim.linear_schedule(0.0, math.inf, 3), r"end_value=inf"),
        (lambda: sl.optim.polynomial_schedule(0.0, 1.0, -1.0, 3), r"power=-1.0"),
        (lambda: sl.optim.cosine_decay_schedule(None, 3), r"init_value=None"),
        (lambda: sl.optim.piecewise_constant_schedule(1.0, {3.5: 0.1}), r"boundary 3.5=3.5"),
        (lambda: sl.optim.piecewise_constant_schedule(1.0, {3: "0.1"}), r"scale at 3='0.1'"),
        (lambda: sl.optim.join_schedules([0.1, "0.2"], [3]), r"join_schedules\(schedule='0.2'\)"),
        (lambda: sl.optim.warmup_constant_schedule(0.0, 1.0, -3), r"warmup_constant_schedule\(warmup_steps=-3\)"),
        (lambda: sl.optim.warmup_stable_decay_schedule(0.0, None, 3, 3, 3), r"=None"),
        (
            lambda: sl.optim.linear_onecycle_schedule(2, 1.0),
            r"linear_onecycle_schedule\(pct_start=0.3, pct_final=0.85\)",
        ),
        (lambda: sl.optim.linear_onecycle_schedule(9, 1.0, 0.5, 0.5), r"pct_start=0.5, pct_final=0.5"),
        (lambda: sl.optim.cosine_onecycle_schedule(9, 1.0, 1.5), r"cosine_onecycle_schedule\(pct_start=1.5\)"),
        (lambda: sl.optim.cosine_onecycle_schedule(9, 1.0, div_factor=0), r"div_factor=0"),
        (lambda: sl.optim.one_cycle(0.1, 1.0, 5, min_momentum=1.5), r"min_momentum=1.5"),
        (lambda: sl.optim.linear_scaling(0.1, 2.5, 1), r"batches of 2.5 and 1 rows"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_step_does_not_advance_a_schedule(stage):
    loss_fn, params = mlp([6, 9, 4])
    good, rate = regression_batch(6, 6, 4), sl.optim.linear_schedule(0.1, 0.0, 4)
    bad = (good[0], torch.full_like(good[1], torch.inf))

    def run(mesh, batches):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(rate), nonfinite="skip")
        for batch in batches:
            state, _ = step(state, share(batch, mesh.rank, 2))
        return state.step, sl.unshard(state.params)

    plain = sl.simulate(run, [good] * 3, mesh={"data": 2})
    skipping = sl.simulate(run, [good, bad, good, bad, bad, good], mesh={"data": 2})
    for (steps, expected), (all_steps, got) in zip(plain, skipping, strict=True):
        assert (steps, all_steps) == (3, 6)
        assert_close(got, expected, 1e-12)


def test_one_cycle_drives_momentum_too():
    """Against torch's SGD under CyclicLR, whose momentum runs in antiphase."""
    start = torch.linspace(-1, 1, 5, dtype=torch.float64)
    cycle = sl.optim.one_cycle(0.01, 0.1, 4, 6, min_momentum=0.5, max_momentum=0.9)
    tx = sl.optim.inject_hyperparams(sl.optim.sgd)(cycle.lr, momentum=cycle.momentum)
    params, theirs = {"w": start}, start.clone().requires_grad_()
    state, torchs = tx.init(params), torch.optim.SGD([theirs], 0.01, momentum=0.9)
    scheduler = lr_scheduler.CyclicLR(torchs, 0.01, 0.1, 4, 6, base_momentum=0.5, max_momentum=0.9)
    for _ in range(10):
        updates, state = tx.update({"w": params["w"] ** 3}, state, params)
        params = sl.optim.apply_updates(params, updates)
        theirs.grad = theirs.detach() ** 3
        torchs.step()
        scheduler.step()
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-12, atol=0)

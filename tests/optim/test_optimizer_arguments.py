"""Wrong arguments: hyper-parameters out of range, gradients of other shapes, values that are no optimizers."""

import inspect
import itertools
import math
from typing import NamedTuple, Union

import numpy as np
import pytest
import torch
from helpers.models import mlp, regression_batch
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import TreeError

opt = sl.optim
SGD = opt.sgd(0.1)
# The arguments that a factory needs beside the one that is tried.
MAKERS = {
    opt.sgd: {"lr": 0.1}, opt.adam: {"lr": 0.1}, opt.adamw: {"lr": 0.1}, opt.adamw8bit: {"lr": 0.1}, opt.lion: {"lr": 0.1},
    opt.lamb: {"lr": 0.1}, opt.adagrad: {"lr": 0.1}, opt.rmsprop: {"lr": 0.1}, opt.adafactor: {"lr": 0.1},
    opt.muon: {"lr": 0.1}, opt.onebit_adam: {"lr": 0.1, "freeze_step": 5}, opt.onebit_lamb: {"lr": 0.1, "freeze_step": 5},
    opt.zero_one_adam: {"lr": 0.1, "var_freeze_step": 5}, opt.clip_by_global_norm: {}, opt.clip_by_value: {},
    opt.adaptive_grad_clip: {"clipping": 0.1},
    opt.clip_by_block_norm: {}, opt.add_decayed_weights: {}, opt.add_noise: {"eta": 0.1, "gamma": 0.5, "key": 0},
    opt.ema: {}, opt.lookahead: {"fast_optimizer": SGD, "sync_period": 5, "slow_step_size": 0.5},
    opt.skip_nonfinite: {"inner": SGD}, opt.skip_unused: {"inner": SGD},
}  # fmt: skip
# Numbers of another kind than "a finite number that is at least 0", and what they may be.
FREE = {"ns_coeffs", "gamma", "decay_offset"}  # of either sign, or no number
SHARES = {"b1", "b2", "momentum", "decay", "beta", "coeff_beta"}
POSITIVE = {
    "clipping",
    "eps", "max_norm", "max_delta", "min_coeff", "max_coeff", "min_factor", "max_factor", "factor_threshold", "decay_rate",
    "clipping_threshold", "slow_step_size", "consistent_rms",
}  # fmt: skip
STEPS = {
    "freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper", "ns_steps",
    "min_dim_size_to_factor", "sync_period",
}  # fmt: skip
OTHER = {"nesterov", "eps_in_sqrt", "centered", "bias_correction", "axis", "scales", "factored", "debias",
         "multiply_by_parameter_scale", "fast_optimizer", "reset_state", "inner", "key", "norm_type"}  # fmt: skip


def wrong_values():
    for make in MAKERS:
        for name in inspect.signature(make).parameters:
            if name in OTHER:
                continue
            bad = [math.nan, math.inf, "0.1", [0.1], True, torch.ones(2)]
            bad += [] if name in FREE else [-1]
            if name in SHARES:
                bad += [1, 1.5]
            elif name in STEPS:
                bad += [0, 2.5]
            elif name in POSITIVE and (make, name) != (opt.adagrad, "eps"):  # whose update is 0 where the squares are
                bad.append(0)
            for value in bad:
                yield pytest.param(make, name, value, id=f"{make.__name__}-{name}-{value}")


@pytest.mark.parametrize(("make", "name", "value"), list(wrong_values()))
def test_a_number_out_of_range_is_refused_by_name(make, name, value):
    with pytest.raises(ValueError, match=rf"^{make.__name__}\(.*{name}="):
        make(**{**MAKERS[make], name: value})


@pytest.mark.parametrize("make", [opt.sgd, opt.adamw, opt.lion, opt.lamb, opt.rmsprop])
def test_numbers_of_numpy_and_tensors_are_accepted(make):
    params = {"w": torch.linspace(-1, 1, 6).view(2, 3)}
    moved = [
        make(lr).update(params, make(lr).init(params), params)[0]["w"]
        for lr in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5))
    ]
    assert all(torch.equal(each, moved[0]) for each in moved)


@pytest.mark.parametrize("name", ["b1", "eps", "weight_decay"])
def test_injected_numbers_are_checked_too(name):
    params = {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=rf"adamw\({name}=-1.0\)"):
        opt.inject_hyperparams(opt.adamw)(0.1, **{name: -1.0})
    tx = opt.inject_hyperparams(opt.adamw)(0.1)
    state = tx.init(params)
    state.hyperparams[name].fill_(-1.0)
    with pytest.raises(ValueError, match=rf"adamw\({name}=-1.0\)"):
        tx.update(params, state, params)
    tx = opt.inject_hyperparams(opt.adamw)(0.1, **{name: lambda step: 0.5 - step})
    state = tx.update(params, tx.init(params), params)[1]
    with pytest.raises(ValueError, match=rf"adamw\({name}=-0.5\)"):
        tx.update(params, state, params)


@pytest.mark.parametrize(
    "annotation",
    [
        float,
        "float",
        float | None,
        Union[float, None],  # noqa: UP007
        "float | Schedule",
        "Optional[float]",
    ],
)
def test_whole_numbers_are_injected_where_floats_are_due(annotation):
    """However the factory's module writes its annotations."""

    def mine(lr, wd=0):
        return opt.chain(opt.add_decayed_weights(wd), opt.sgd(lr))

    params = {"w": torch.full((3,), 2.0)}
    with pytest.raises(ValueError, match=r"no argument of mine is a number .*an int counts where .* annotated float"):
        opt.inject_hyperparams(mine)(1, wd=1)
    mine.__annotations__ = {"lr": annotation, "wd": annotation}
    for arguments in ((1,), (1, 3)):
        tx, plain = opt.inject_hyperparams(mine)(*arguments), mine(*arguments)
        state = tx.init(params)
        assert {name: value.item() for name, value in state.hyperparams.items()} == {
            "lr": 1.0,
            "wd": sum(arguments[1:]),
        }
        assert torch.equal(
            tx.update(params, state, params)[0]["w"], plain.update(params, plain.init(params), params)[0]["w"]
        )
    mine.__annotations__ = {"lr": annotation, "wd": int}
    assert list(opt.inject_hyperparams(mine)(1, wd=1).init(params).hyperparams) == ["lr"]


def test_whole_rates_of_the_library_are_injected():
    state = opt.inject_hyperparams(opt.sgd)(1).init({"w": torch.ones(3)})
    assert {name: value.item() for name, value in state.hyperparams.items()} == {"lr": 1.0, "momentum": 0.0}


def test_momentum_that_a_schedule_brings_to_zero_goes_on():
    """The trace is kept: at 0 it is the gradient."""
    params, grads = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    tx = opt.inject_hyperparams(opt.sgd)(0.5, momentum=lambda step: [0.0, 0.5, 0.0, 0.5][int(step)])
    state, moved = tx.init(params), []
    for _ in range(4):
        moves, state = tx.update(grads, state, params)
        moved.append(moves["w"][0].item())
    assert moved == [-1.0, -1.5, -1.0, -1.5]


@pytest.mark.parametrize("make", [opt.sgd, opt.rmsprop])
def test_none_is_no_momentum_as_in_optax(make):
    params = {"w": torch.ones(3)}
    none, zero = ((tx := make(0.1, momentum=each)).update(params, tx.init(params), params) for each in (None, 0.0))
    assert_same(none, zero)


@pytest.mark.parametrize("make", [opt.sgd, opt.rmsprop])
def test_nesterov_goes_with_momentum(make):
    with pytest.raises(ValueError, match=r"\(nesterov=True\): .*nesterov goes with"):
        make(0.1, nesterov=True)


def test_adafactors_decay_begins_after_its_offset():
    params, grads = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    tx = opt.adafactor(0.1, decay_offset=2)
    state = tx.init(params)
    for _ in range(4):
        moves, state = tx.update(grads, state, params)
        assert torch.isfinite(moves["w"]).all()


UPDATED = {
    "sgd": lambda: opt.sgd(0.1, 0.9), "adam": lambda: opt.adam(0.1), "adamw": lambda: opt.adamw(0.1),
    "lion": lambda: opt.lion(0.1, weight_decay=0.0), "decay": lambda: opt.add_decayed_weights(0.1),
    "adamw8bit": lambda: opt.adamw8bit(0.1), "lamb": lambda: opt.lamb(0.1), "adagrad": lambda: opt.adagrad(0.1),
    "rmsprop": lambda: opt.rmsprop(0.1), "adafactor": lambda: opt.adafactor(0.1),
    "clip": lambda: opt.clip_by_global_norm(1.0),
    "lookahead": lambda: opt.lookahead(SGD, 2, 0.5), "masked": lambda: opt.masked(SGD, "*"),
    "onebit_adam": lambda: opt.onebit_adam(0.1, 5), "from torch": lambda: opt.from_torch(torch.optim.NAdam),
    "injected": lambda: opt.inject_hyperparams(opt.adam)(0.1), "chain": lambda: opt.chain(opt.clip_by_value(1.0), SGD),
    "rounded": lambda: opt.stochastic_rounding(SGD), "skip": lambda: opt.skip_nonfinite(SGD, 3),
    "partition": lambda: opt.partition({"x": SGD}, {"*": "x"}),
}  # fmt: skip
PARAMS = {"a": torch.ones(3), "b": torch.ones(2, 3)}


@pytest.mark.parametrize(
    "name", ["adamw", "decay", "adamw8bit", "lamb", "lookahead", "onebit_adam", "from torch", "rounded"]
)
def test_an_update_that_needs_the_parameters_says_so(name):
    tx = UPDATED[name]()
    with pytest.raises(ValueError, match=r"\w+ needs the parameters: update\(updates, state, params\)"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("name", UPDATED)
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"a": torch.ones(1), "b": torch.ones(2, 3)}, r"a: updates of shape \(1,\), \w+ of shape \(3,\)"),
        ({"a": torch.ones(3), "b": torch.ones(3)}, r"b: updates of shape \(3,\), \w+ of shape \(2, 3\)"),
        ({"a": torch.ones(3)}, r"b: in the \w+ alone"),
        ({"a": torch.ones(3), "b": None}, r"b: in the \w+ alone"),
        ({**PARAMS, "c": torch.ones(3)}, r"c: in the updates alone"),
    ],
)
def test_gradients_of_another_shape_are_not_spread_over_parameters(name, grads, message):
    tx = UPDATED[name]()
    state = tx.init(PARAMS)
    with pytest.raises(TreeError, match=message):
        tx.update(grads, state, PARAMS)


@pytest.mark.parametrize(
    "make", [lambda: opt.sgd(0.1, 0.9), lambda: opt.adam(0.1), lambda: opt.lion(0.1, weight_decay=0.0)]
)
def test_gradients_of_another_shape_are_not_spread_over_moments(make):
    tx = make()
    with pytest.raises(TreeError, match=r"a: updates of shape \(1,\)"):
        tx.update({"a": torch.ones(1), "b": torch.ones(2, 3)}, tx.init(PARAMS))


@pytest.mark.parametrize("make", [lambda: opt.ema(0.9), opt.swa])
def test_parameters_of_another_shape_are_not_spread_over_averages(make):
    average = make()
    with pytest.raises(TreeError, match=r"a: tree of shape \(1,\), average of shape \(3,\)"):
        average.update({"a": torch.ones(1), "b": torch.ones(2, 3)}, average.init(PARAMS))


def test_updates_of_another_shape_are_not_spread_over_parameters():
    with pytest.raises(TreeError, match=r"apply_updates.*\n.*a: updates of shape \(1,\), parameters of shape \(3,\)"):
        sl.optim.apply_updates(PARAMS, {"a": torch.ones(1), "b": torch.ones(2, 3)})
    sharded = sl.shard(PARAMS, sl.make_mesh())
    with pytest.raises(TreeError, match=r"parameters are a Sharded and updates a dict.*sl\.unshard"):
        sl.optim.apply_updates(sharded, PARAMS)


class GradientTransformationExtraArgs(NamedTuple):
    """An object like those of optax."""

    init: object
    update: object


OPTAX = GradientTransformationExtraArgs(lambda params: (), lambda updates, state, params=None: (updates, state))
FIT, NET = mlp([3, 4, 2], torch.float32)
WRONG = {
    "torch's": (
        lambda: torch.optim.AdamW([torch.ones(1)]),
        r"from_torch\(torch\.optim\.AdamW, lr=\.\.\.\) or sl\.optim\.adamw",
    ),
    "its class": (lambda: torch.optim.NAdam, r"from_torch\(torch\.optim\.NAdam, lr=\.\.\.\)"),
    "optax's": (lambda: OPTAX, r"GradientTransformationExtraArgs of .*sl\.optim has optax's"),
    "a factory": (lambda: opt.adamw, r"the function adamw; call it if it makes one, adamw\(\.\.\.\)"),
    "a function": (lambda: lambda grads, state: grads, r"the function <lambda>"),
    "a list": (lambda: [SGD, SGD], r"a list of them; give them one by one to sl\.optim\.chain"),
    "a string": (lambda: "adamw", r"sl\.optim\.adamw\(3e-4\), not 'adamw'"),
    "a number": (lambda: 1e-3, r"not 0\.001"),
    "None": (lambda: None, r"not None; give one"),
}
TAKING = {
    "make_train_step": lambda tx: sl.make_train_step(FIT, NET, tx),
    "make_plan": lambda tx: sl.make_plan(NET, sl.abstract_mesh(data=2), optimizer=tx),
    "chain": lambda tx: opt.chain(SGD, tx),
    "named_chain": lambda tx: opt.named_chain(("a", tx)),
    "masked": lambda tx: opt.masked(tx, "*"),
    "partition": lambda tx: opt.partition({"x": tx}, {"*": "x"}),
    "lookahead": lambda tx: opt.lookahead(tx, 2, 0.5),
    "skip_nonfinite": lambda tx: opt.skip_nonfinite(tx, 2),
    "skip_unused": opt.skip_unused,
    "stochastic_rounding": lambda tx: opt.stochastic_rounding(tx),
    "inject_hyperparams": lambda tx: opt.inject_hyperparams(lambda lr: tx)(0.1),
}


# A plan may do without.
@pytest.mark.parametrize(
    ("name", "where"), [pair for pair in itertools.product(WRONG, TAKING) if pair != ("None", "make_plan")]
)
def test_values_that_are_no_optimizers_are_refused_with_a_remedy(where, name):
    make, message = WRONG[name]
    with pytest.raises(TypeError, match=rf"^{where} takes gradient transformations.*{message}"):
        TAKING[where](make())


def test_the_remedies_work():
    batch = regression_batch(4, 3, 2, torch.float32)
    for tx in (opt.from_torch(torch.optim.AdamW, lr=1e-3), opt.adamw(3e-4), opt.chain(*[SGD, SGD])):
        state, step = sl.make_train_step(FIT, NET, tx)
        step(state, batch)
    with pytest.raises(TypeError, match=r"from_torch takes the class, .*from_torch\(torch\.optim\.AdamW, lr=\.\.\.\)"):
        opt.from_torch(torch.optim.AdamW([torch.ones(1)]))
    with pytest.raises(TypeError, match=r"named_chain\(\) takes pairs"):
        opt.named_chain(SGD)


WRAPPED = {
    "masked": lambda tx: opt.masked(tx, "*"),
    "partition": lambda tx: opt.partition({"x": tx}, {"*": "x"}),
    "skip": lambda tx: opt.skip_nonfinite(tx, 2),
    "unused": opt.skip_unused,
    "injected": lambda tx: opt.inject_hyperparams(lambda lr: tx)(0.1),
    "rounded": opt.stochastic_rounding,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_last_transformation_stays_last_inside_a_wrapper(name):
    inner = WRAPPED[name](opt.lookahead(SGD, 2, 0.5))
    with pytest.raises(ValueError, match="put it last"):
        opt.chain(inner, opt.clip_by_value(1.0))
    opt.chain(opt.clip_by_value(1.0), inner)

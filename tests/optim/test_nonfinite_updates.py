"""NaN and infinity in a gradient propagate through every optimizer, as in optax."""

import math

import optree
import pytest
import torch

import shardlib as sl

opt = sl.optim
SIZE = 80  # squared, enough elements that adamw8bit keeps codes
BLOCK = 256
AXIS = {"b1": 0.9, "b2": 0.98}
OPTIMIZERS = {
    "sgd": lambda: opt.sgd(0.1),
    "momentum": lambda: opt.sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: opt.adam(0.1),
    "adamw": lambda: opt.adamw(0.1),
    "adamw8bit": lambda: opt.adamw8bit(0.1),
    "lion": lambda: opt.lion(0.1),
    "lion without decay": lambda: opt.lion(0.1, weight_decay=0.0),
    "lamb": lambda: opt.lamb(0.1),
    "adagrad": lambda: opt.adagrad(0.1),
    "adagrad from zero": lambda: opt.adagrad(0.1, 0.0),
    "rmsprop": lambda: opt.rmsprop(0.1),
    "centred rmsprop": lambda: opt.rmsprop(0.1, centered=True, momentum=0.9),
    "adafactor": lambda: opt.adafactor(0.1, 8),
    "adafactor, not factored": lambda: opt.adafactor(0.1, factored=False),
    "muon": lambda: opt.muon(0.1),
    "lookahead": lambda: opt.lookahead(opt.lion(0.1), 2, 0.5),
    "stochastic rounding": lambda: opt.stochastic_rounding(opt.lion(0.1)),
    "masked": lambda: opt.chain(opt.masked(opt.clip_by_value(1.0), "other"), opt.lion(0.1)),
    "injected": lambda: opt.inject_hyperparams(opt.lion)(0.1),
    "noise": lambda: opt.chain(opt.add_noise(0.1, 0.5, 0), opt.sgd(0.1)),
    "decayed": lambda: opt.chain(opt.add_decayed_weights(0.1), opt.lion(0.1)),
    "clipped": lambda: opt.chain(opt.clip_by_global_norm(1.0), opt.lion(0.1)),
    "clipped by block": lambda: opt.chain(opt.clip_by_block_norm(1.0), opt.lion(0.1)),
    "averaged": lambda: opt.chain(opt.ema(0.9), opt.lion(0.1)),
    "from torch": lambda: opt.from_torch(torch.optim.NAdam, lr=0.1),
    "1-bit Adam": lambda: opt.onebit_adam(0.1, 2, **AXIS),
    "1-bit LAMB": lambda: opt.onebit_lamb(0.1, 2, **AXIS),
    "0/1 Adam": lambda: opt.zero_one_adam(0.1, 2, **AXIS),
}


def trees():
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (SIZE, SIZE), "other": (3, 5)}
    params, grads = (
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2)
    )
    grads["w"][:, 7] = 0.0  # a column that no gradient has reached
    return params, grads


def spoiled(grads, value, position):
    grads = optree.tree_map(torch.clone, grads)
    grads["w"][position] = value
    return grads


STATELESS = ("sgd", "noise")


@pytest.mark.parametrize("position", [(0, 0), (5, 7)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 4])
def test_nan_propagates(name, position, at):
    """NaN shows in the state after update and in parameters after apply; ``at``: before and after variances are frozen."""
    params, grads = trees()
    tx, written = OPTIMIZERS[name](), optree.tree_map(torch.clone, params)
    state, mine = tx.init(params), tx.init(written)
    for number in range(at + 3):
        now = spoiled(grads, math.nan, position) if number == at else grads
        moves, state = tx.update(now, state, params)
        mine = tx.apply(written, optree.tree_map(torch.clone, now), mine)
        if number < at:
            assert all(torch.isfinite(leaf).all() for leaf in optree.tree_leaves((moves, written)))
            continue
        assert not torch.isfinite(written["w"][position])
        if number == at or name not in STATELESS:
            assert not torch.isfinite(moves["w"][position]), f"swallowed {number - at} steps later"


SIGNS = ("lion", "lion without decay", "lookahead", "stochastic rounding", "masked", "injected", "decayed", "averaged")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in SIGNS])
def test_infinity_is_no_step(name):
    params, grads = trees()
    tx = OPTIMIZERS[name]()
    moves, _ = tx.update(spoiled(grads, math.inf, (0, 0)), tx.init(params), params)
    assert not torch.isfinite(moves["w"][0, 0])


def test_only_the_block_of_a_nonfinite_gradient_becomes_nan():
    params, grads = trees()
    tx = opt.adamw8bit(0.1)
    _, state = tx.update(spoiled(grads, math.nan, (0, 3)), tx.init(params), params)
    moves, _ = tx.update(grads, state, params)
    bad = ~torch.isfinite(moves["w"].view(-1))
    assert bad[:BLOCK].all() and not bad[BLOCK:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_of_zero_makes_no_nan_in_16_bits(dtype):
    """Adam has eps=0 here."""
    params = {"w": torch.ones(8, dtype=dtype)}
    tx = opt.adamw(0.1, weight_decay=0.0)
    moves, _ = tx.update({"w": torch.zeros(8, dtype=dtype)}, tx.init(params), params)
    assert moves["w"].tolist() == [0.0] * 8


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_skipping_looks_at_what_gradients_are_multiplied_by(scale):
    """In a train step gradients are unscaled and averaged while they are applied."""
    tx = opt.skip_nonfinite(opt.adam(0.1), 3)
    params = {"w": torch.ones(4)}
    state = tx.init(params)
    state = tx.apply(params, {"w": torch.zeros(4)}, state, scale=torch.tensor(scale, dtype=torch.float64))
    assert torch.equal(params["w"], torch.ones(4)) and state.notfinite_count == 1


@pytest.mark.parametrize("name", ["lamb", "1-bit LAMB"])
def test_a_trust_ratio_of_nan_is_not_taken_for_one(name):
    """As in optax, the norm of a parameter scales its whole step."""
    params, grads = trees()
    tx = OPTIMIZERS[name]()
    moves, _ = tx.update(spoiled(grads, math.nan, (0, 0)), tx.init(params), params)
    assert torch.isnan(moves["w"]).all() and torch.isfinite(moves["other"]).all()

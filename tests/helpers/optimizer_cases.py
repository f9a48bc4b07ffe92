"""Every gradient transformation by name, for the tests that all of them must pass."""

from dataclasses import dataclass

import torch

import shardlib as sl
from shardlib.optim import Locality

MATRICES = ("*stack", "*tall", "*wide")
VECTORS = ("*bias", "*gain", "*zero")
HALF = sl.optim.cosine_decay_schedule(0.1, 60)
opt = sl.optim


def by_matrix(matrix, rest):
    """``matrix`` for what has several dimensions; ``rest`` for the others."""
    return opt.partition({"matrix": matrix, "rest": rest}, lambda path, shape: "matrix" if len(shape) > 1 else "rest")


@dataclass(frozen=True)
class Case:
    """A transformation, what it declares, and whether it is for matrices alone."""

    make: object
    locality: Locality = Locality.ELEMENTWISE
    matrices: bool = False


LEAF, GLOBAL, WHOLE = Locality.LEAF, Locality.GLOBAL, Locality.WHOLE

# Those that optax has too, under the names of tests/oracle/optax_trajectories.py.
RECORDED = {
    "sgd": Case(lambda: opt.sgd(0.05, momentum=0.9, nesterov=True)),
    "adam": Case(lambda: opt.adam(0.05, b1=0.8)),
    "adamw": Case(lambda: opt.adamw(HALF, weight_decay=0.3, eps=1e-3)),
    "lion": Case(lambda: opt.lion(0.01, weight_decay=0.1)),
    "lamb": Case(lambda: opt.lamb(0.02, weight_decay=0.1, min_coeff=1e-30, max_coeff=1e30), LEAF),
    "adagrad": Case(lambda: opt.adagrad(0.2)),
    "adagrad from zero": Case(lambda: opt.adagrad(HALF, 0.0, 1e-3)),
    "rmsprop": Case(lambda: opt.rmsprop(0.02)),
    "rmsprop centered": Case(
        lambda: opt.rmsprop(0.02, 0.95, 1e-3, centered=True, momentum=0.7, initial_scale=0.5)
    ),
    "rmsprop corrected": Case(
        lambda: opt.rmsprop(HALF, eps=1e-4, eps_in_sqrt=False, momentum=0.5, nesterov=True, bias_correction=True)
    ),
    "adafactor": Case(lambda: opt.adafactor(0.05, min_dim_size_to_factor=4), LEAF),
    "adafactor carried": Case(lambda: opt.adafactor(HALF, 3, 0.7, momentum=0.8, weight_decay_rate=0.01), LEAF),
    "adafactor bare": Case(
        lambda: opt.adafactor(0.02, 1, multiply_by_parameter_scale=False, clipping_threshold=None, eps=1e-3), LEAF
    ),
    "adafactor whole": Case(lambda: opt.adafactor(0.05, factored=False), LEAF),
    "muon": Case(lambda: opt.muon(0.02), WHOLE, matrices=True),
    "muon plain": Case(
        lambda: opt.muon(0.02, nesterov=False, weight_decay=0.1, beta=0.9, ns_steps=4), WHOLE, matrices=True
    ),
    "muon rms": Case(lambda: opt.muon(0.02, consistent_rms=0.2), WHOLE, matrices=True),
    "named_chain": Case(
        lambda: opt.named_chain(("clip", opt.clip_by_global_norm(1.0)), ("adam", opt.adam(HALF))), GLOBAL
    ),
    "masked": Case(lambda: opt.chain(opt.masked(opt.add_decayed_weights(0.3), MATRICES), opt.sgd(0.05))),
    "masked clip": Case(
        lambda: opt.chain(opt.masked(opt.clip_by_global_norm(0.5), "*", exclude=VECTORS), opt.sgd(0.05)),
        GLOBAL,
    ),
    "partition": Case(
        lambda: opt.partition(
            {"matrix": opt.adamw(0.05, weight_decay=0.2), "rest": opt.sgd(0.02)},
            dict.fromkeys(MATRICES, "matrix") | {"*": "rest"},
        )
    ),
    "inject_hyperparams": Case(lambda: opt.inject_hyperparams(opt.adamw)(HALF, weight_decay=0.2)),
    "ema": Case(lambda: opt.chain(opt.ema(0.9), opt.sgd(0.1))),
    "ema biased": Case(lambda: opt.chain(opt.ema(0.9, debias=False), opt.sgd(0.1))),
    "clip_by_value": Case(lambda: opt.chain(opt.clip_by_value(0.3), opt.sgd(0.1))),
    "clip_by_block_norm": Case(lambda: opt.chain(opt.clip_by_block_norm(0.7), opt.sgd(0.1)), LEAF),
    "skip_nonfinite": Case(lambda: opt.skip_nonfinite(opt.adam(0.05), 2), GLOBAL),
    "lookahead": Case(lambda: opt.lookahead(opt.adam(0.05), 5, 0.5)),
    "lookahead reset": Case(lambda: opt.lookahead(opt.sgd(0.05, momentum=0.9), 4, 0.7, reset_state=True)),
}  # fmt: skip

CASES = RECORDED | {
    "adaptive_grad_clip": Case(lambda: opt.chain(opt.adaptive_grad_clip(0.2), opt.sgd(0.1)), LEAF),
    # Below the size from which its moments are coded; what coding does is in tests/optim/test_adamw8bit.py.
    "adamw8bit": Case(lambda: opt.adamw8bit(HALF, weight_decay=0.3)),
    "add_noise": Case(lambda: opt.chain(opt.add_noise(0.01, 0.55, key=3), opt.sgd(0.1))),
    "masked last": Case(lambda: opt.chain(opt.sgd(0.05), opt.masked(opt.clip_by_value(0.01), MATRICES))),
    "stochastic_rounding": Case(lambda: opt.stochastic_rounding(opt.adamw(HALF))),
    "swa": Case(lambda: opt.chain(opt.swa(), opt.sgd(0.1))),
    "from_torch": Case(lambda: opt.from_torch(torch.optim.NAdam, lr=0.02, weight_decay=0.1)),
    "from_torch scheduled": Case(lambda: opt.from_torch(torch.optim.SGD, lr=HALF, momentum=0.9)),
    "muon and adamw": Case(
        lambda: opt.chain(opt.clip_by_global_norm(1.0), by_matrix(opt.muon(0.02), opt.adamw(0.01))), WHOLE
    ),
    "lookahead around muon and adafactor": Case(
        lambda: opt.lookahead(by_matrix(opt.muon(0.02), opt.adafactor(0.05, 1)), 2, 0.5), WHOLE
    ),
    "masked in partition": Case(
        lambda: by_matrix(
            opt.chain(opt.masked(opt.clip_by_block_norm(0.1), "*", exclude="*wide*"), opt.sgd(0.1)),
            opt.inject_hyperparams(opt.lamb)(0.02),
        ),
        LEAF,
    ),
}


def model():
    """``(loss_fn, params)``: units whose leaves are padded on 2 to 4 ranks, a scalar, a tied matrix, one zero at first."""
    generator = torch.Generator().manual_seed(11)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

    wide = leaf(4, 5)
    first = {"bias": leaf(7), "gain": leaf().abs() + 0.5, "stack": leaf(2, 4, 3), "tall": leaf(6, 4), "wide": wide}
    return loss_fn, {"first": first, "second": {"also": wide, "wide": leaf(3, 6), "zero": torch.zeros(3).double()}}


def loss_fn(params, batch):
    x, y = batch
    p, q = params["first"], params["second"]
    h = torch.tanh(x @ p["wide"].T) + (x @ q["also"].T).square()
    z = torch.tanh(h @ p["tall"].T + p["bias"][1:]) * p["gain"] + p["bias"][0]
    return (z @ q["wide"].T + q["zero"] + torch.einsum("bi,sij->bj", h, p["stack"]) - y).square().mean()


def batches(steps, rows=12):
    generator = torch.Generator().manual_seed(12)
    return [
        tuple(torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (5, 3))
        for _ in range(steps)
    ]

"""Trajectories of optax's optimizers: 50 steps in float32, recorded with optax 0.2.8 and jax 0.10.2 on a CPU.

jax and optax are 530 MB, so the tests read what this file wrote. To write it again, where both are installed:

    python tests/oracle/optax_trajectories.py

64 bits are enabled there: 1 − b2ᵗ, which optax computes in jax's default dtype, loses most of its digits in float32 (1e-5 of
Adam's steps). Parameters, gradients and states are float32.

Imports nothing from shardlib; without optax it only tells the parameters, the gradients, and what was recorded.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
STEPS = 50
KEPT = (1, 2, 3, 5, 10, 20, 30, 40, 50)  # steps after which parameters are recorded
SHAPES = {"bias": (7,), "gain": (), "stack": (2, 4, 3), "tall": (6, 4), "wide": (4, 5), "zero": (3,)}
MATRICES = ("stack", "tall", "wide")
BAD = (5, 20, 21)  # steps at which the gradients of "skip_nonfinite" are not finite


def start(paths=tuple(SHAPES)):
    """Path -> float32 parameters; one is zero at first."""
    drawn = np.random.RandomState(7)
    found = {path: drawn.standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()}
    return {path: 0 * value if path == "zero" else value for path, value in found.items() if path in paths}


def noise(step):
    """Path -> the part of step ``step``'s gradient (from 0) that is drawn; larger in some steps than in others."""
    drawn = np.random.RandomState(1000 + step)
    return {
        path: (drawn.standard_normal(shape) * 2.0 ** (step % 5 - 2)).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def gradients(name, step, params, lift=np.asarray):
    """Noise, and a pull to zero so that a step's error is felt in those that follow; ``lift`` makes arrays the caller's."""
    drawn = noise(step)
    found = {path: 0.3 * value + lift(drawn[path]) for path, value in params.items()}
    if name == "skip_nonfinite" and step in BAD:
        found["gain"] = found["gain"] * float("nan")
    return found


def recorded(name):
    """Path -> ``[len(KEPT), *shape]``."""
    with np.load(FILE) as file:
        return {key.partition("/")[2]: file[key] for key in file.files if key.partition("/")[0] == name}


def cases(optax):
    """Name -> (optimizer, paths of its parameters)."""
    every = tuple(SHAPES)
    rows = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)

    def muon(**options):
        return optax.contrib.muon(0.02, muon_weight_dimension_numbers=lambda p: dict.fromkeys(p, rows), **options)

    half = optax.cosine_decay_schedule(0.1, 60)
    decayed = {path: path in MATRICES for path in every}
    labels = {path: "matrix" if path in MATRICES else "rest" for path in every}
    found = {
        "sgd": optax.sgd(0.05, momentum=0.9, nesterov=True),
        "adam": optax.adam(0.05, b1=0.8),
        "adamw": optax.adamw(half, weight_decay=0.3, eps=1e-3),
        "lion": optax.lion(0.01, weight_decay=0.1),
        "lamb": optax.lamb(0.02, weight_decay=0.1),
        "adagrad": optax.adagrad(0.2),
        "adagrad from zero": optax.adagrad(half, 0.0, 1e-3),
        "rmsprop": optax.rmsprop(0.02),
        "rmsprop centered": optax.rmsprop(0.02, 0.95, 1e-3, centered=True, momentum=0.7, initial_scale=0.5),
        "rmsprop corrected": optax.rmsprop(
            half, eps=1e-4, eps_in_sqrt=False, momentum=0.5, nesterov=True, bias_correction=True
        ),
        "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
        "adafactor carried": optax.adafactor(half, 3, 0.7, momentum=0.8, weight_decay_rate=0.01),
        "adafactor bare": optax.adafactor(
            0.02, 1, multiply_by_parameter_scale=False, clipping_threshold=None, eps=1e-3
        ),
        "adafactor whole": optax.adafactor(0.05, factored=False),
        "muon": muon(),
        "muon plain": muon(nesterov=False, weight_decay=0.1, beta=0.9, ns_steps=4),
        "muon rms": muon(consistent_rms=0.2),
        "named_chain": optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.adam(half))),
        "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.3), decayed), optax.sgd(0.05)),
        "masked clip": optax.chain(optax.masked(optax.clip_by_global_norm(0.5), decayed), optax.sgd(0.05)),
        "partition": optax.partition({"matrix": optax.adamw(0.05, weight_decay=0.2), "rest": optax.sgd(0.02)}, labels),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(half, weight_decay=0.2),
        "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
        "ema biased": optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1)),
        "clip_by_value": optax.chain(optax.clip(0.3), optax.sgd(0.1)),
        "clip_by_block_norm": optax.chain(
            optax.partition({path: optax.clip_by_global_norm(0.7) for path in every}, {path: path for path in every}),
            optax.sgd(0.1),
        ),
        "skip_nonfinite": optax.apply_if_finite(optax.adam(0.05), 2),
        "lookahead": optax.lookahead(optax.adam(0.05), 5, 0.5),
        "lookahead reset": optax.lookahead(optax.sgd(0.05, momentum=0.9), 4, 0.7, reset_state=True),
    }  # fmt: skip
    return {name: (tx, MATRICES if name.startswith("muon") else every) for name, tx in found.items()}


def record():
    import jax
    import jax.numpy as jnp
    import optax
    import optax.contrib

    jax.config.update("jax_enable_x64", True)
    results = {}
    for name, (tx, paths) in cases(optax).items():
        ahead = name.startswith("lookahead")
        params = {path: jnp.asarray(value) for path, value in start(paths).items()}
        params = optax.LookaheadParams.init_synced(params) if ahead else params
        state, kept = tx.init(params), []

        @jax.jit
        def move(grads, state, params, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for step in range(STEPS):
            params, state = move(gradients(name, step, params.fast if ahead else params), state, params)
            if step + 1 in KEPT:
                kept.append(params.fast if ahead else params)
        for path in paths:
            results[f"{name}/{path}"] = np.stack([np.asarray(tree[path]) for tree in kept])
            assert results[f"{name}/{path}"].dtype == np.float32
    np.savez_compressed(FILE, **results)


if __name__ == "__main__":
    record()

"""Training under plans whose states, parameters and gradients are moved elsewhere, and that must not change by it."""

import shardlib as sl
from helpers import training
from helpers.cuts import tiny_blocks
from helpers.models import share, tiny_gpt, token_batches
from helpers.trees import assert_same
from shardlib.plan.loss_scale import LossScale

MAX_NORM = 0.3
# The scale overflows at first, and again whenever it has grown.
OVERFLOWING = sl.precision("fp16", loss_scale=LossScale(2.0**24, window=7, hysteresis=1))


def tx():
    return sl.optim.chain(sl.optim.clip_by_global_norm(MAX_NORM), sl.optim.adamw(1e-2))


def trained(transforms, mesh, steps, *more):
    """Losses, norms and parameters."""
    loss_fn, params = tiny_blocks() if "pipe" in mesh else tiny_gpt()
    transform = sl.chain(*transforms, *more)
    return sl.simulate(
        lambda mesh: training.train(mesh, loss_fn, params, token_batches(steps), transform, tx(), nonfinite="skip"),
        mesh=mesh,
    )[0]


def stepped(state, step, batches):
    """The state after steps with this rank's shares of ``batches``."""
    mesh = state.params.mesh
    for batch in batches:
        state, _ = step(state, share(batch, mesh.rank, mesh.size))
    return state


def assert_alike(found, wanted):
    """Both are of `trained`. Losses and norms are compared as text, since NaN differs from itself."""
    assert repr(found[:2]) == repr(wanted[:2])
    assert_same(found[2], wanted[2])

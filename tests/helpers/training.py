"""Training through the library, as one function that any mesh can run."""

import pytest
import torch

import shardlib as sl
from helpers.models import share
from helpers.trees import assert_close
from shardlib.execute.batches import batch_index

LR, EPS, DECAY = 1e-3, 1e-5, 0.01


def optimizer(max_norm=None, **changes):
    """AdamW as the oracles have it.

    eps is not the usual 1e-8: the true gradient of a key's bias is zero (softmax ignores a shift), and Adam
    with a tiny eps would turn its rounding noise into steps of full size.
    """
    adamw = sl.optim.adamw(LR, eps=EPS, weight_decay=DECAY, **changes)
    return adamw if max_norm is None else sl.optim.chain(sl.optim.clip_by_global_norm(max_norm), adamw)


def train(mesh, loss_fn, params, batches, transform, tx, **options):
    """Losses, norms and whole parameters after training on this rank's shares of ``batches``."""
    sharded = sl.shard(params, mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, tx, **options)
    plan = sharded.plan
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, share(batch, batch_index(plan, sharded.mesh), plan.batch_ranks))
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    return losses, norms, sl.unshard(state.params)


def simulate(mesh, loss_fn, params, batches, transform, tx, **options):
    """`train` on every simulated rank; all must agree, and one's results are returned."""
    torch.manual_seed(0)
    results = sl.simulate(lambda m: train(m, loss_fn, params, batches, transform, tx, **options), mesh=mesh)
    for losses, norms, _ in results:
        assert losses == results[0][0] and norms == results[0][1], "ranks report different losses"
    return results[0]


def assert_same_training(found, wanted, tolerance=1e-10, norms=None):
    """That two trainings have the same losses, norms and parameters, up to a relative error; ``norms``: their own."""
    assert found[0] == pytest.approx(wanted[0], rel=tolerance, abs=0)
    assert found[1] == pytest.approx(wanted[1], rel=norms or tolerance, abs=0)
    assert_close(found[2], wanted[2], tolerance)

"""`reproducible`: the same bits of state and losses on every mesh."""

from dataclasses import replace

import pytest
import torch
from helpers.bits import digest, whole
from helpers.models import TINY, share, token_batches
from shardlib.execute.batches import batch_index

import shardlib as sl
from shardlib.models import gpt

TOTAL, ROWS, STEPS = 8, 24, 3
CONFIG = replace(TINY, dropout=0.2, layers=3)


def adamw():
    return sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(1e-2, weight_decay=0.1))


def lamb():
    return sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.lamb(1e-2, weight_decay=0.1))


def trained(mesh, transform, make_optimizer, config=CONFIG, steps=STEPS):
    """The SHA-256 of the losses and of the state after some steps."""
    params = sl.shard(gpt.to_blocks(gpt.init(config)), mesh, transform)
    state, step = sl.make_train_step(gpt.make_sequential(config), params, make_optimizer(), rng=7)
    plan, losses = params.plan, []
    for batch in token_batches(steps, ROWS, config):
        state, metrics = step(state, share(batch, batch_index(plan, params.mesh), plan.batch_ranks))
        losses.append((metrics["loss"], metrics["grad_norm"]))
    return digest((losses, whole(state)))


def digest_on(mesh, transform, make_optimizer=adamw, **options):
    found = sl.simulate(lambda m: trained(m, transform, make_optimizer, **options), mesh=mesh)
    assert len(set(found)) == 1, "ranks differ"
    return found[0]

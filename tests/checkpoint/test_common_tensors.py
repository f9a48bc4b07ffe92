"""What is not sharded of an optimizer's state: every stage's is saved and restored, not that of rank 0 alone."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.models import TINY, share, tiny_gpt, token_batches
from helpers.saved import tensors

import shardlib as sl
from shardlib.checkpoint.replicated import replicated_leaves
from shardlib.checkpoint.trees import trees_of
from shardlib.errors import CheckpointError
from shardlib.execute.batches import batch_index
from shardlib.models import gpt

CONFIG = replace(TINY, width=12, heads=2, layers=2)
BATCH = token_batches(1, 12, CONFIG)[0]
MESH = {"pipe": 2, "data": 2}


class Own(NamedTuple):
    seen: Any


def own(entry):
    """A user's optimizer that keeps a tensor for each of its buckets, under the name ``entry(bucket)``."""

    def init(params, shards):
        return Own({entry(name): torch.zeros(3) for name in params})

    def update(updates, state, params=None, *, shards):
        number = sum(map(torch.numel, updates.values()))  # differs between stages
        seen = {name: held + number + index for index, (name, held) in enumerate(state.seen.items())}
        return {name: -0.1 * flat for name, flat in updates.items()}, Own(seen)

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


OPTIMIZERS = {
    "factors": lambda: sl.optim.adafactor(1e-2, min_dim_size_to_factor=4),
    "masked": lambda: sl.optim.chain(sl.optim.masked(sl.optim.ema(0.9), "*bias"), sl.optim.adamw(1e-2)),
    "torch's own": lambda: sl.optim.from_torch(torch.optim.NAdam, lr=1e-2),
    "a tensor for each bucket": lambda: own(lambda bucket: bucket),
    "a tensor for each stage": lambda: own(lambda bucket: f"of {bucket}"),
}


def start(mesh, tx):
    _, params = tiny_gpt(width=CONFIG.width, heads=CONFIG.heads)
    plan = sl.chain(sl.zero(1), sl.pipeline("1f1b", microbatches=2))
    return sl.make_train_step(gpt.make_sequential(CONFIG), sl.shard(gpt.to_blocks(params), mesh, plan), tx)


def trained(mesh, tx):
    state, step = start(mesh, tx)
    plan = state.params.plan
    for _ in range(2):
        state, _ = step(state, share(BATCH, batch_index(plan, mesh), plan.batch_ranks))
    return state


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_stages_tensors_come_back(tmp_path, name, asynchronous):
    def run(mesh):
        state = trained(mesh, OPTIMIZERS[name]())
        before = {name: leaf.clone() for name, leaf in replicated_leaves(trees_of(state))}
        with sl.checkpoint.Manager(tmp_path, asynchronous=asynchronous) as manager:
            manager.save(state)
        state = sl.checkpoint.restore(tmp_path, start(mesh, OPTIMIZERS[name]())[0])
        return before, dict(replicated_leaves(trees_of(state)))

    held = None
    for before, after in sl.simulate(run, mesh=MESH):
        held = held or tensors(sl.checkpoint.latest(tmp_path))
        assert before and before.keys() == after.keys() <= held.keys()
        for key, wanted in before.items():
            assert torch.equal(after[key], wanted) and torch.equal(held[key], wanted), key


def test_stages_hold_tensors_that_others_lack():
    """The case above is one: without it, it would prove nothing."""

    def run(mesh):
        return {name for name, _ in replicated_leaves(trees_of(start(mesh, own(lambda bucket: f"of {bucket}"))[0]))}

    first, *_, last = sl.simulate(run, mesh=MESH)
    assert last - first and first - last


def test_different_values_under_one_name_are_refused(tmp_path):
    def run(mesh):
        state = trained(mesh, own(lambda bucket: "all"))
        with pytest.raises(CheckpointError, match=r"different values under one name:\n  - opt/inner/seen/all\n"):
            sl.checkpoint.save(tmp_path, state)

    sl.simulate(run, mesh=MESH)
    assert sl.checkpoint.latest(tmp_path) is None

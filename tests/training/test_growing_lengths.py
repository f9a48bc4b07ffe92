"""Training while sequences become longer and rows more or fewer: every plan trains like one device."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from helpers import training
from helpers.models import TINY, tiny_gpt
from helpers.trees import assert_close
from oracle import one_device

import shardlib as sl
from shardlib.models import gpt

SIZES = {"layers": 4, "width": 8, "heads": 4, "sequence": 16}
CONFIG = replace(TINY, **SIZES, dtype=torch.float64)
LENGTHS = sl.data.discrete_pace([4, 8, 16], [1, 2])  # two, one and two steps
STEPS, MAX_NORM = 5, 0.3
SLICES = sl.tensor_slicing(gpt.slicing_rules(CONFIG))
PLANS = {
    "truncate": sl.data.curriculum(8, length=LENGTHS),
    "reshape": sl.data.curriculum(8, length=LENGTHS, surplus="reshape"),
    "rows": sl.data.curriculum(sl.data.map_paces(lambda length: 128 // length, LENGTHS), length=LENGTHS),
}
CASES = {
    "stage 0": ({"data": 2}, sl.zero(0)),
    "stage 1": ({"data": 2}, sl.zero(1)),
    "stage 2, micro-batches": ({"data": 2}, sl.chain(sl.zero(2), sl.accumulate(2))),
    "stage 3": ({"data": 2}, sl.zero(3)),
    "stage 3, recomputed": ({"data": 2}, sl.chain(sl.zero(3), sl.remat("full"))),
    "stage 3, offload": ({"data": 2}, sl.chain(sl.zero(3), sl.offload(params="host"))),
    "inputs on the host": ({"data": 2}, sl.chain(sl.zero(1), sl.remat(store="host", smallest=1))),
    "inputs divided": (
        {"model": 2},
        sl.chain(SLICES, sl.remat(store="sharded", smallest=1)),
    ),
    "slices": ({"data": 2, "model": 2}, sl.chain(sl.zero(1), sl.tensor_slicing(gpt.slicing_rules(CONFIG)))),
    "slices of sequences": (
        {"model": 2},
        sl.chain(SLICES, sl.sequence("model", "megatron")),
    ),
    "ring": ({"data": 1, "seq": 2}, sl.chain(sl.zero(2), sl.sequence("seq", "ring"))),
    "ulysses": ({"data": 2, "seq": 2}, sl.chain(sl.zero(3), sl.sequence("seq", "ulysses"))),
    "pipeline": ({"data": 2, "pipe": 2}, sl.chain(sl.zero(1), sl.pipeline("1f1b", microbatches=2))),
    "pipeline, recomputed": ({"pipe": 2}, sl.chain(sl.pipeline("zb-h1", microbatches=4), sl.remat("full"))),
    "pipeline, stage 3": (
        {"data": 2, "pipe": 2},
        sl.chain(sl.zero(3), sl.pipeline("interleaved-1f1b", microbatches=2)),
    ),
}


def text():
    drawn = torch.randint(CONFIG.vocab, (40, CONFIG.sequence + 1), generator=torch.Generator().manual_seed(6))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


def model(blocks):
    loss_fn, params = tiny_gpt(torch.float64, **SIZES)
    return (gpt.make_sequential(CONFIG), gpt.to_blocks(params)) if blocks else (loss_fn, params)


@functools.cache
def expected(plan, blocks):
    """Of whole batches on one device."""
    batches = itertools.islice(sl.data.loader(text(), sl.make_mesh(), PLANS[plan]), STEPS)
    return one_device.train(*model(blocks), list(batches), max_norm=MAX_NORM)


def train(mesh, plan, transform, blocks):
    loss_fn, params = model(blocks)
    sharded = sl.shard(params, mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(MAX_NORM))
    losses, norms = [], []
    for batch in itertools.islice(sl.data.loader(text(), state, PLANS[plan]), STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    return losses, norms, sl.unshard(state.params)


def check(results, plan, blocks):
    for losses, norms, final in results:
        wanted = expected(plan, blocks)
        assert losses == pytest.approx(wanted[0], rel=1e-10, abs=0)
        assert norms == pytest.approx(wanted[1], rel=1e-9, abs=0)
        assert_close(final, wanted[2], 1e-10)


# Each case with one of the plans on every commit, and with the others nightly.
PRODUCT = [
    pytest.param(case, plan, marks=[] if (number + other) % len(PLANS) == 0 else [pytest.mark.nightly])
    for number, case in enumerate(CASES)
    for other, plan in enumerate(PLANS)
]


@pytest.mark.parametrize(("case", "plan"), PRODUCT)
def test_every_plan_trains_on_as_shapes_change(case, plan):
    mesh, transform = CASES[case]
    blocks = "pipe" in mesh
    expected(plan, blocks)  # before the ranks run
    check(sl.simulate(train, plan, transform, blocks, mesh=mesh), plan, blocks)


def test_the_same_on_real_processes(pool):
    mesh, transform = CASES["pipeline, stage 3"]
    check(pool.run(train, "reshape", transform, True, mesh=mesh), "reshape", True)

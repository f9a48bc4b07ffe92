"""Data × pipeline × tensor × sequence on eight ranks, every ZeRO stage and schedule: all train like one device."""

import functools
import itertools
import math
import os
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import training
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.pool import Pool
from helpers.trees import assert_close
from hypothesis import given, note, settings
from hypothesis import strategies as st
from oracle import one_device

import shardlib as sl
from shardlib.models import gpt

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
SIZES = {"vocab": 32, "layers": 6, "width": 8, "heads": 4, "sequence": 8, "dropout": 0.1}
CONFIG = replace(TINY, **SIZES)
STEPS, MAX_NORM, SEED = 20 if NIGHTLY else 3, 0.3, 11
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v"]


@dataclass(frozen=True)
class Case:
    """What is drawn: a mesh and what its axes are for."""

    mesh: tuple[tuple[str, int], ...]
    stage: int
    schedule: str
    microbatches: int
    sync: str | None
    sequence: str | None  # "megatron" is over the axis "model"
    remat: str | None
    dtype: torch.dtype
    tie: bool

    def transform(self):
        axes = dict(self.mesh)
        hybrid = {"replicate": "node"} if "node" in axes else {}
        parts = [sl.zero(self.stage, **hybrid)]
        if "pipe" in axes:
            parts.append(sl.pipeline(self.schedule, microbatches=self.microbatches, sync=self.sync))
        elif self.microbatches > 1:
            parts.append(sl.accumulate(self.microbatches, sync=self.sync))
        if "model" in axes:
            parts.append(sl.tensor_slicing(gpt.slicing_rules(CONFIG, blocks=True)))
        if self.sequence:
            parts.append(sl.sequence("model" if self.sequence == "megatron" else "seq", self.sequence))
        if self.remat:
            parts.append(sl.remat(self.remat))
        return sl.chain(*parts)


@st.composite
def cases(draw, ranks=8):
    """A factorisation of the ranks over the axes, and settings that are legal on it."""
    sizes = dict.fromkeys(("node", "data", "pipe", "model", "seq"), 1)
    for _ in range(int(math.log2(ranks))):
        axis = draw(st.sampled_from([axis for axis, size in sizes.items() if axis != "node" and size < 4]))
        sizes["node" if axis == "data" and draw(st.booleans()) else axis] *= 2
    mesh = {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}
    schedule = draw(st.sampled_from(SCHEDULES))
    stage = draw(st.integers(0, 3))
    microbatches = draw(st.sampled_from([1, 2, 4]))
    splits = stage >= 2 and microbatches > 1
    splits_backward = "pipe" in mesh and schedule.startswith(("zb", "interleaved-zb"))
    kinds = ["ulysses", "ring"] if "seq" in mesh else [None, "megatron"] if "model" in mesh else [None]
    return Case(
        mesh=tuple(draw(st.permutations(list(mesh.items())))),
        stage=stage,
        schedule=schedule,
        microbatches=microbatches,
        sync=draw(st.sampled_from([None, "last", "each"])) if splits else None,
        sequence=draw(st.sampled_from(kinds)),
        remat=draw(st.sampled_from([None, "full"] if splits_backward else [None, "full", "dots"])),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        tie=draw(st.booleans()),
    )


def model(dtype, tie):
    _, params = tiny_gpt(dtype, **SIZES, tie=tie)
    return gpt.make_sequential(replace(CONFIG, tie=tie)), gpt.to_blocks(params)


@functools.cache
def expected(dtype, tie):
    loss_fn, params = model(dtype, tie)
    step = itertools.count()

    def keyed(params, batch):
        return loss_fn(params, batch, rng=sl.Key(SEED).fold_in(next(step)))

    return one_device.train(keyed, params, token_batches(STEPS, rows=16, config=CONFIG), max_norm=MAX_NORM)


def train(mesh, case):
    loss_fn, params = model(case.dtype, case.tie)
    batches = token_batches(STEPS, rows=16, config=CONFIG)
    optimizer = training.optimizer(MAX_NORM)
    return training.train(mesh, loss_fn, params, batches, case.transform(), optimizer, rng=SEED)


def check(case, results):
    losses, norms, final = expected(case.dtype, case.tie)
    tolerance = TOLERANCE[case.dtype]
    for got in results:
        assert got[0] == pytest.approx(losses, rel=tolerance, abs=0)
        assert got[1] == pytest.approx(norms, rel=10 * tolerance, abs=0)
    for _, _, found in results[:1] if case.dtype is torch.float64 else results:
        assert_close(found, final, tolerance)


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@settings(max_examples=200 if NIGHTLY else 40)
@given(cases())
def test_every_factorisation_trains_like_one_device(case):
    note(str(case))
    check(case, sl.simulate(train, case, mesh=dict(case.mesh)))


@pytest.mark.timeout(1200 if NIGHTLY else 300)
@settings(max_examples=12)
@given(cases(ranks=4))
def test_the_same_on_real_processes(pool, case):
    check(case, pool.run(train, case, mesh=dict(case.mesh)))


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_same_on_eight_real_processes():
    eight = Pool(8)
    try:

        @settings(max_examples=12)
        @given(cases(ranks=8))
        def run(case):
            check(case, eight.run(train, case, mesh=dict(case.mesh)))

        run()
    finally:
        eight.stop()

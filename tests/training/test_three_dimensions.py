"""Data × pipeline × tensor × sequence on eight ranks, every ZeRO stage and schedule: all train like one device.

The library's GPT, and transformers' Llama as it is (in float64 with norms that do not round to fp32), which is held to
the loss of the whole model.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import decoders, training
from helpers.lossless_codec import Travelling
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.pool import Pool
from helpers.profile import NIGHTLY
from helpers.trees import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import one_device

import shardlib as sl
from shardlib.models import gpt, huggingface

SIZES = {"vocab": 32, "layers": 6, "width": 8, "heads": 4, "sequence": 8, "dropout": 0.1}
CONFIG = replace(TINY, **SIZES)
MODELS = ["gpt", "llama"]
ROWS = 16
STEPS, MAX_NORM, SEED = 20 if NIGHTLY else 2, 0.3, 11
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v"]


@dataclass(frozen=True)
class Case:
    """A drawn case: a model, a mesh and the uses of its axes."""

    model: str
    tie: bool
    dtype: torch.dtype
    mesh: tuple[tuple[str, int], ...]
    stage: int
    schedule: str
    microbatches: int
    sync: str | None
    sequence: str | None  # "megatron" is over the axis "model"
    remat: str | None
    encoded: bool  # gradients and gathered parameters go through a codec that loses nothing

    def transform(self, rules):
        axes = dict(self.mesh)
        hybrid = {"replicate": "node"} if "node" in axes else {}
        parts = [sl.zero(self.stage, **hybrid)]
        if "pipe" in axes:
            parts.append(sl.pipeline(self.schedule, microbatches=self.microbatches, sync=self.sync))
        elif self.microbatches > 1:
            parts.append(sl.accumulate(self.microbatches, sync=self.sync))
        if "model" in axes:
            parts.append(sl.tensor_slicing(rules))
        if self.sequence:
            parts.append(sl.sequence("model" if self.sequence == "megatron" else "seq", self.sequence))
        if self.remat:
            parts.append(sl.remat(self.remat))
        if self.encoded:
            itemsize = self.dtype.itemsize
            parts.append(Travelling("data", self.stage == 3, itemsize))
            parts += [Travelling("node", itemsize=itemsize)] if "node" in axes else []
        return sl.chain(*parts)


@st.composite
def cases(draw, model, ranks=8):
    """A factorisation of the ranks over the axes, and settings that are legal on it."""
    # transformers' attention takes whole sequences alone.
    sizes = dict.fromkeys(("node", "data", "pipe", "model", *(["seq"] if model == "gpt" else [])), 1)
    for _ in range(int(math.log2(ranks))):
        axis = draw(st.sampled_from([axis for axis, size in sizes.items() if axis != "node" and size < 4]))
        sizes["node" if axis == "data" and draw(st.booleans()) else axis] *= 2
    mesh = {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}
    schedule = draw(st.sampled_from(SCHEDULES))
    stage = draw(st.integers(0, 3))
    microbatches = draw(st.sampled_from([n for n in (1, 2, 4) if n * sizes["node"] * sizes["data"] <= ROWS]))
    splits = stage >= 2 and microbatches > 1
    kinds = [None]
    if "seq" in mesh:  # ulysses shares out the heads that tensor slicing leaves a rank
        kinds = ["ring"] + ["ulysses"] * (SIZES["heads"] % (sizes["model"] * sizes["seq"]) == 0)
    elif "model" in mesh and model == "gpt":
        kinds.append("megatron")
    return Case(
        model=model,
        tie=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        mesh=tuple(draw(st.permutations(list(mesh.items())))),
        stage=stage,
        schedule=schedule,
        microbatches=microbatches,
        sync=draw(st.sampled_from([None, "last", "each"])) if splits else None,
        sequence=draw(st.sampled_from(kinds)),
        remat=draw(st.sampled_from([None, "full", "dots"])),
        encoded=draw(st.booleans()),
    )


class Made(NamedTuple):
    """A model: as blocks, as a function for one device, and what it is trained on."""

    loss_fn: Any
    alone: Any
    params: list
    rules: dict
    batches: list
    options: dict


@functools.cache
def make(model, dtype, tie):
    if model == "llama":
        module = decoders.decoder("llama", tie=tie, num_hidden_layers=SIZES["layers"])
        module = decoders.in_float64(module) if dtype is torch.float64 else module
        rules, batches = huggingface.slicing_rules(module, blocks=True), decoders.label_batches(STEPS, ROWS)
        loss_fn, params = decoders.cut(module)
        return Made(loss_fn, decoders.whole_loss(module), params, rules, batches, {})
    _, params = tiny_gpt(dtype, **SIZES, tie=tie)
    loss_fn, step = gpt.make_sequential(replace(CONFIG, tie=tie)), itertools.count()

    def keyed(params, batch):
        return loss_fn(params, batch, rng=sl.Key(SEED).fold_in(next(step)))

    rules, batches = gpt.slicing_rules(CONFIG, blocks=True), token_batches(STEPS, ROWS, CONFIG)
    return Made(loss_fn, keyed, gpt.to_blocks(params), rules, batches, {"rng": SEED})


@functools.cache
def expected(*which):
    made = make(*which)
    return one_device.train(made.alone, made.params, made.batches, max_norm=MAX_NORM)


def train(mesh, case):
    made = make(case.model, case.dtype, case.tie)
    transform, optimizer = case.transform(made.rules), training.optimizer(MAX_NORM)
    return training.train(mesh, made.loss_fn, made.params, made.batches, transform, optimizer, **made.options)


def check(case, run):
    # Before the ranks run: all of them would make the model at once.
    losses, norms, final = expected(case.model, case.dtype, case.tie)
    results = run(train, case, mesh=dict(case.mesh))
    tolerance = TOLERANCE[case.dtype]
    for got in results:
        assert got[0] == pytest.approx(losses, rel=tolerance, abs=0)
        assert got[1] == pytest.approx(norms, rel=10 * tolerance, abs=0)
    for _, _, found in results[:1] if case.dtype is torch.float64 else results:
        assert_close(found, final, tolerance)


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=100 if NIGHTLY else 10)
@given(data=st.data())
def test_every_factorisation_trains_like_one_device(model, data):
    check(data.draw(cases(model)), sl.simulate)


@pytest.mark.timeout(1200 if NIGHTLY else 300)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=6 if NIGHTLY else 3)
@given(data=st.data())
def test_the_same_on_real_processes(pool, model, data):
    check(data.draw(cases(model, ranks=4)), pool.run)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_same_on_eight_real_processes():
    eight = Pool(8)
    try:

        @settings(max_examples=12)
        @given(st.sampled_from(MODELS).flatmap(cases))
        def run(case):
            check(case, eight.run)

        run()
    finally:
        eight.stop()

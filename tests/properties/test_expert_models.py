"""Drawn GPTs with experts on drawn meshes: the training of one device that takes the ranks' shares one after the other."""

import math

import pytest
import torch
from helpers.profile import NIGHTLY
from helpers.training import optimizer, simulate
from helpers.trees import assert_close
from hypothesis import given, note
from hypothesis import strategies as st
from optree import tree_map

import shardlib as sl
from shardlib.models import gpt
from shardlib.nn import routers

VOCAB, LENGTH = 17, 4
CAPACITIES = st.none() | st.builds(
    routers.Capacity,
    st.sampled_from([0.5, 1.0, 1.5]),
    st.just(1),
    st.sampled_from(["position", "random", "probability"]),
)
ROUTERS = st.one_of(
    st.builds(
        routers.top_k,
        st.sampled_from([1, 2]),
        renormalise=st.sampled_from([None, "chosen", "kept"]),
        score=st.sampled_from(["softmax", "sigmoid"]),
        sampled=st.booleans(),
        capacity=CAPACITIES,
        load=st.sampled_from(["first", "mean", "sum"]),
    ),
    st.builds(routers.gshard, CAPACITIES, second=st.sampled_from(["best", "kept at random", "sampled"])),
    st.builds(routers.expert_choice, st.sampled_from([1.0, 1.5])),
)
MESHES = st.sampled_from(
    [
        {"data": 2},
        {"data": 3},
        {"data": 2, "expert": 2},
        {"data": 1, "model": 2},
        {"data": 1, "expert": 2, "model": 2},
        {"data": 1, "pipe": 2},
        {"data": 1, "pipe": 2, "expert": 2},
    ]
)


@st.composite
def configs(draw):
    number = st.sampled_from([2, 4])  # which axes of two divide
    per_layer = draw(st.one_of(st.tuples(number), st.tuples(st.just(0), number), st.tuples(number, number)))
    config = sl.nn.MoEConfig(
        draw(ROUTERS), draw(st.sampled_from(["swiglu", "gelu_tanh", "relu"])), draw(st.sampled_from([0.0, 0.2]))
    )
    widths = st.sampled_from([0, 4])
    experts = gpt.Experts(
        per_layer, config, hidden=6, shared=draw(widths), residual=draw(widths), z=draw(st.sampled_from([0.0, 0.05]))
    )
    return gpt.GPTConfig(
        vocab=VOCAB, layers=2, width=4, heads=2, sequence=LENGTH, dtype=torch.float64, moe=experts,
        dropout=draw(st.sampled_from([0.0, 0.3])),
    )  # fmt: skip


@pytest.mark.timeout(1200 if NIGHTLY else 300)
@given(configs(), MESHES, st.integers(0, 3), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 99))
def test_training_is_that_of_the_shares(config, mesh, stage, microbatches, recomputed, seed):
    staged, axes = "pipe" in mesh, [axis for axis in ("data", "expert") if axis in mesh]
    shares = microbatches * math.prod(mesh[axis] for axis in axes)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2 * shares, LENGTH + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    params = tree_map(lambda p: p + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype), gpt.init(config))
    loss_fn = (gpt.make_sequential if staged else gpt.make_loss)(config)
    given_params = gpt.to_blocks(params) if staged else params
    transforms = [
        sl.zero(stage, axis=tuple(axes)),
        *([sl.experts()] if "expert" in mesh else []),
        *([sl.tensor_slicing(gpt.slicing_rules(config, blocks=staged))] if "model" in mesh else []),
        *([sl.remat()] if recomputed else []),
        *([sl.pipeline("1f1b", microbatches=microbatches)] if staged else []),
        *([sl.accumulate(microbatches)] if microbatches > 1 and not staged else []),
    ]
    note(f"{config} {transforms}")
    alone = sl.chain(sl.zero(0), *([sl.accumulate(shares)] if shares > 1 else []))

    def run(mesh, transform):
        return simulate(mesh, loss_fn, given_params, [batch], transform, optimizer(1.0), rng=seed)

    wanted, got = run({"data": 1}, alone), run(mesh, sl.chain(*transforms))
    assert got[0] == pytest.approx(wanted[0], rel=1e-10)
    assert got[1] == pytest.approx(wanted[1], rel=1e-9)
    assert_close(got[2], wanted[2], 1e-10)

"""A state saved under one drawn plan and restored under another is the same, and every byte that is read was predicted."""

import json
import tempfile
from dataclasses import replace

import pytest
import torch
from helpers.models import TINY, share, tiny_gpt, token_batches
from helpers.profile import NIGHTLY
from helpers.saved import CountedReads, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.checkpoint.fragments import PARAMS, source_of
from shardlib.common import thresholds
from shardlib.execute.batches import batch_index
from shardlib.models import gpt
from shardlib.tree import leaves_of

CONFIG = replace(TINY, width=12, heads=2, layers=2)
ROWS = 12
BATCH = token_batches(1, ROWS, CONFIG)[0]
OPTIMIZERS = {
    "adamw": lambda: sl.optim.adamw(1e-2),
    "a chain with names": lambda: sl.optim.named_chain(
        ("clip", sl.optim.clip_by_global_norm(1.0)), ("average", sl.optim.ema(0.9)), ("lamb", sl.optim.lamb(1e-2))
    ),
    "partition": lambda: sl.optim.partition(
        {"matrix": sl.optim.adafactor(1e-2, min_dim_size_to_factor=4), "rest": sl.optim.sgd(0.1, momentum=0.9)},
        lambda path, shape: "matrix" if len(shape) == 2 else "rest",
    ),
    "torch's own": lambda: sl.optim.from_torch(torch.optim.NAdam, lr=1e-2),
}


@st.composite
def plans(draw):
    """A mesh of at most 4 ranks, and what its axes are used for."""
    sizes = draw(st.sampled_from([
        {"data": 1}, {"data": 2}, {"data": 3}, {"data": 4}, {"node": 2, "data": 2}, {"data": 2, "model": 2},
        {"model": 2, "data": 1}, {"pipe": 2, "data": 2}, {"pipe": 2, "data": 1, "model": 2},
    ]))  # fmt: skip
    stage = draw(st.integers(0, 3))
    parts = [sl.zero(stage, **({"replicate": "node"} if "node" in sizes else {}))]
    if "model" in sizes:
        parts.append(sl.tensor_slicing(gpt.slicing_rules(CONFIG, blocks=True)))
    if "pipe" in sizes:
        parts.append(sl.pipeline("1f1b", microbatches=2))
    if draw(st.booleans()):
        parts.append(sl.precision(draw(st.sampled_from(["bf16", "fp16"]))))
    if draw(st.booleans()) and stage < 3 and "node" not in sizes:
        parts.append(draw(st.sampled_from([sl.onebit(), sl.quantize(gradients="int8", feedback=True)])))
    return sizes, sl.chain(*parts)


def fresh(mesh, transform, optimizer, tie, seed):
    _, params = tiny_gpt(width=CONFIG.width, heads=CONFIG.heads, tie=tie)
    if seed == 4:  # nothing may be right before it is restored
        for leaf in leaves_of(params):
            leaf.zero_()
    params = gpt.to_blocks(params)
    return sl.make_train_step(
        gpt.make_sequential(replace(CONFIG, tie=tie)),
        sl.shard(params, mesh, transform),
        OPTIMIZERS[optimizer](),
        rng=seed,
    )


def saved_once(mesh, folder, transform, optimizer, tie):
    state, step = fresh(mesh, transform, optimizer, tie, seed=3)
    plan = state.params.plan
    for _ in range(2):
        state, _ = step(state, share(BATCH, batch_index(plan, mesh), plan.batch_ranks))
    return sl.checkpoint.save(folder, state)


def saved_again(mesh, first, folder, transform, optimizer, tie):
    state, _ = fresh(mesh, transform, optimizer, tie, seed=4)
    predicted = sl.checkpoint.bytes_to_read(first, state)
    state = sl.checkpoint.restore(first, state)
    return predicted, sl.checkpoint.save(folder, state)


def loss_scale(folder):
    scale = json.loads((folder / "manifest.json").read_text())["scale"]
    return scale["value"] if scale else 1.0


def totals(saved):
    """Path -> the sum of all ranks' residuals of gradients."""
    found = {}
    for name, tensor in saved.items():
        if name.startswith("comm/sum/"):
            path = name.split("/", 4)[4]
            found[path] = found.get(path, 0) + tensor.double()
    return found


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@settings(max_examples=500 if NIGHTLY else 6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=plans(), after=plans(), optimizer=st.sampled_from(sorted(OPTIMIZERS)), tie=st.booleans(),
    small=st.sampled_from([1 << 30, 1 << 30, 100, 16]),
)  # fmt: skip
def test_from_any_plan_to_any(monkeypatch, before, after, optimizer, tie, small):
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch, thresholds.small(small):
        (mesh, transform), (other_mesh, other) = before, after
        first = sl.simulate(saved_once, f"{folder}/a", transform, optimizer, tie, mesh=mesh)[0]
        counted = CountedReads(patch)
        ranks = sl.simulate(saved_again, first, f"{folder}/b", other, optimizer, tie, mesh=other_mesh)
        assert counted.bytes == sum(predicted for predicted, _ in ranks)
        assert all(predicted for predicted, _ in ranks)
        wanted, found = tensors(first), tensors(ranks[0][1])
        restored = [name for name in found if not name.startswith("comm/")]
        assert restored
        for name in restored:
            source = wanted[source_of(name, wanted)]
            assert torch.equal(found[name], source.to(found[name].dtype)), name
        assert {name for name in wanted if name.startswith(PARAMS)} <= set(found)
        residuals = totals(wanted)
        for path, total in totals(found).items() if residuals else ():
            # A residual of scaled gradients is scaled too.
            shown = total / loss_scale(ranks[0][1]), residuals[path] / loss_scale(first)
            torch.testing.assert_close(*shown, rtol=1e-5, atol=1e-8)

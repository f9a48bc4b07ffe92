"""A checkpoint of format 1, written by shardlib 0.1.0 and kept beside this file, is restored for ever.

It was written by ``python checkpoint/test_golden.py`` in the folder tests/, on two ranks that slice a model times two that
share the batch, in 16 bits and with one-bit exchanges. The file of facts was written with it.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers.models import TINY, share, tiny_gpt, token_batches
from helpers.saved import tensors

import shardlib as sl
from shardlib.execute.batches import batch_index
from shardlib.models import gpt
from shardlib.tree import flatten, leaves_of

GOLDEN = Path(__file__).parent / "golden"
BATCH = token_batches(1, 12)[0]
SLICED = sl.tensor_slicing(gpt.slicing_rules(TINY))
PLANS = {
    "as saved": ({"data": 2, "model": 2}, sl.chain(SLICED, sl.zero(2), sl.precision("bf16"), sl.onebit())),
    "one rank": ({"data": 1}, sl.zero(0)),
    "stage 3 on three": ({"data": 3}, sl.chain(sl.zero(3), sl.precision("bf16"))),
}


def start(mesh, transform, fill=None):
    loss_fn, params = tiny_gpt()
    for leaf in leaves_of(params) if fill is not None else ():
        leaf.fill_(fill)
    return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.adamw(1e-2), rng=5)


def after_a_step(mesh, state, step):
    """The state after another step, and the loss of the state before."""
    plan = state.params.plan
    state, metrics = step(state, share(BATCH, batch_index(plan, mesh), plan.batch_ranks))
    return state, float(metrics["loss"])


def facts(folder):
    """Name -> mean magnitude of each tensor."""
    return {name: tensor.double().abs().mean().item() for name, tensor in tensors(folder).items()}


def write():
    def run(mesh):
        state, step = start(mesh, PLANS["as saved"][1])
        for _ in range(2):
            state, _ = after_a_step(mesh, state, step)
        folder = sl.checkpoint.save(GOLDEN, state, notes={"position": 24})
        return folder, after_a_step(mesh, state, step)[1]

    folder, loss = sl.simulate(run, mesh=PLANS["as saved"][0])[0]
    (GOLDEN / "facts.json").write_text(json.dumps({"loss": loss, "means": facts(folder)}, indent=1))


def test_its_tensors_are_what_they_were():
    assert facts(GOLDEN / "step-00000002") == json.loads((GOLDEN / "facts.json").read_text())["means"]
    assert sl.checkpoint.read_notes(GOLDEN) == {"position": 24}


@pytest.mark.parametrize("name", PLANS)
def test_it_is_restored(name):
    mesh, transform = PLANS[name]
    wanted = json.loads((GOLDEN / "facts.json").read_text())

    def run(mesh):
        state, step = start(mesh, transform, fill=0.5)
        state = sl.checkpoint.restore(GOLDEN, state)
        assert (state.step, state.rng.seed) == (2, sl.Key(5).seed)
        return sl.unshard(state.params), after_a_step(mesh, state, step)[1]

    params, loss = sl.simulate(run, mesh=mesh)[0]
    paths, leaves, _ = flatten(params)
    for path, leaf in zip(paths, leaves, strict=True):
        mean = leaf.double().abs().mean().item()
        assert mean == pytest.approx(
            wanted["means"][f"opt/masters/{path}"], rel=2e-3 if leaf.dtype != torch.float32 else 1e-6
        )
    assert loss == pytest.approx(wanted["loss"], rel=5e-3)


if __name__ == "__main__":
    write()

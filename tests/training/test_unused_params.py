"""Parameters that the loss does not use: found on every mesh, and left alone once frozen, as by optimizers of torch."""

from dataclasses import replace

import pytest
import torch
from helpers.models import TINY, regression_batch, share, tiny_gpt, token_batches
from torch import nn

import shardlib as sl
from shardlib.models import gpt

BATCH = regression_batch(8, 6, 4)


class Model(nn.Module):
    """A model with an unused branch and norm, and a bias that reaches the loss times zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.unused_head, self.norm = nn.Linear(6, 4), nn.Linear(6, 4), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, x):
        for layer in (self.layers[0], self.layers[2]):
            x = torch.tanh(layer(x))
        return self.head(x) + 0 * self.scale


UNUSED = {"layers/1/weight", "layers/1/bias", "unused_head/weight", "unused_head/bias", "norm/weight", "norm/bias"}


def model():
    module = Model()
    apply, params = sl.from_module(module)
    return module, (lambda p, batch: (apply(p, batch[0]) - batch[1]).square().mean()), params


SLICED = {"layers/0": sl.column(), "layers/2": sl.row(), "unused_head": sl.column()}
PARALLEL = {
    **{f"stage {stage}": sl.zero(stage) for stage in range(4)},
    "accumulated": sl.chain(sl.zero(2), sl.accumulate(2)),
    "compressed": sl.chain(sl.zero(0), sl.onebit()),
    "sliced": sl.chain(sl.zero(3), sl.tensor_slicing(SLICED, axis="model")),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_unused_parameters_are_found(name):
    _, loss, params = model()
    mesh = {"data": 2, "model": 2} if name == "sliced" else {"data": 2}

    def run(mesh):
        return sl.unused_params(loss, sl.shard(params, mesh, PARALLEL[name]), share(BATCH, mesh.coords["data"], 2))

    for found in sl.simulate(run, mesh=mesh):
        assert set(found) == UNUSED and len(found) == len(UNUSED)


def test_unused_parameters_on_one_device():
    _, loss, params = model()
    assert set(sl.unused_params(loss, params, BATCH)) == UNUSED


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("tie", [False, True])
def test_unused_parameters_in_the_stages_of_a_pipeline(schedule, tie):
    config = replace(TINY, tie=tie)
    _, params = tiny_gpt(tie=tie)
    blocks = gpt.to_blocks(params)
    blocks[1]["extra"], blocks[2]["extra"] = torch.ones(3), {"more": torch.ones(2)}
    parallel = sl.chain(sl.zero(1), sl.pipeline(schedule=schedule, microbatches=2, axis="pipe"))

    def run(mesh):
        sharded = sl.shard(blocks, mesh, parallel)
        batch = share(token_batches(1, 8, config)[0], mesh.coords["data"], 2)
        return sl.unused_params(gpt.make_sequential(config), sharded, batch)

    for found in sl.simulate(run, mesh={"pipe": 2, "data": 2}):
        assert set(found) == {"1/extra", "2/extra/more"}


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_one_rank_uses_are_used(stage):
    params = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}

    def run(mesh):
        def loss(p, x):
            both = p["a"].sum() + p["b"].sum()  # at stage 3 ranks gather alike
            return (both if mesh.rank == 0 else p["a"].sum() + p["b"].detach().sum()) * x.mean()

        return sl.unused_params(loss, sl.shard(params, mesh, sl.zero(stage)), torch.ones(2))

    assert sl.simulate(run, mesh={"data": 2}) == [("c",)] * 2


@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_are_left_alone_as_by_torch(stage):
    _, loss, params = model()
    module, _, _ = model()  # another, with tensors of its own
    tx = torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.3)
    for _ in range(5):
        tx.zero_grad()
        (module(BATCH[0]) - BATCH[1]).square().mean().backward()
        tx.step()
    wanted = {name.replace(".", "/"): leaf.detach() for name, leaf in module.named_parameters()}

    def run(mesh, frozen):
        batch = share(BATCH, mesh.rank, 2)
        parallel = sl.zero(stage)
        if frozen:
            unused = sl.unused_params(loss, sl.shard(params, mesh, parallel), batch)
            parallel = sl.chain(parallel, sl.freeze(unused))
        optimizer = sl.optim.adamw(0.05, weight_decay=0.3)
        state, step = sl.make_train_step(loss, sl.shard(params, mesh, parallel), optimizer)
        for _ in range(5):
            state, _ = step(state, batch)
        whole = sl.unshard(state.params)
        return {path: _at(whole, path) for path in wanted}

    for found in sl.simulate(run, True, mesh={"data": 2}):
        for path, leaf in wanted.items():
            torch.testing.assert_close(found[path], leaf, rtol=1e-10, atol=1e-12)
    optaxs = sl.simulate(run, False, mesh={"data": 2})[0]
    for path, leaf in wanted.items():  # a decay of 0.3 at a rate of 0.05, five times
        torch.testing.assert_close(optaxs[path], leaf * 0.985**5 if path in UNUSED else leaf, rtol=1e-10, atol=1e-12)


def _at(tree, path):
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


def test_a_model_of_transformers_trains_as_torch_does():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    module = transformers.CLIPVisionModel(config).double()
    apply, params = sl.from_module(module)
    pixels = torch.randn(4, 3, 8, 8, dtype=torch.float64)

    def loss(p, x):
        return apply(p, pixel_values=x).last_hidden_state.square().mean()

    unused = sl.unused_params(loss, params, pixels)
    assert unused and all("post_layernorm" in path for path in unused)
    sharded = sl.shard(params, sl.make_mesh(), sl.freeze(unused))
    state, step = sl.make_train_step(loss, sharded, sl.optim.adamw(0.01, eps=1e-4, weight_decay=0.5))
    tx = torch.optim.AdamW(
        module.parameters(), 0.01, eps=1e-4, weight_decay=0.5
    )  # a key's bias has gradients of rounding
    for _ in range(3):
        state, _ = step(state, pixels)
        tx.zero_grad()
        module(pixel_values=pixels).last_hidden_state.square().mean().backward()
        tx.step()
    whole = sl.unshard(state.params)
    for name, leaf in module.named_parameters():
        torch.testing.assert_close(_at(whole, name.replace(".", "/")), leaf.detach(), rtol=1e-9, atol=1e-12)

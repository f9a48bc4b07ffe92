"""Layers of experts on meshes: the training of one device, whichever rank has which token."""

import pytest
import torch
from helpers import training

import shardlib as sl
from shardlib.nn import routers

CONFIG = sl.nn.MoEConfig(routers.top_k(2, renormalise="chosen", sampled=True), jitter=0.3)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 3


PARAMS = [
    {
        "router": {"weight": normal(4, 4, seed=seed)},
        "experts": {"gate": normal(4, 6, 4, seed=seed), "up": normal(4, 6, 4), "down": normal(4, 4, 6)},
        "shared": {"gate": normal(6, 4), "up": normal(6, 4), "down": normal(4, 6), "scale": normal(1, 4)},
    }
    for seed in (3, 4)
]
BATCH = {"x": normal(4, 8, 4, seed=5)}


def layer(params, x, rng):
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    x = x + sl.nn.attention(heads, heads, heads).transpose(1, 2).flatten(2)
    return x + sl.nn.moe(params, x, CONFIG, rng)[0]


def trained(mesh, *transforms, wrap=sl.block):
    marked, chain = wrap(layer), sl.chain(*transforms)

    def loss_fn(params, batch, rng):
        x = sl.nn.shard_sequence(batch["x"])
        for index, one in enumerate(params):
            x = marked(one, x, rng.fold_in(index))
        return sl.nn.sum_sequence(x.square().sum()) / batch["x"].numel()

    return training.simulate(mesh, loss_fn, PARAMS, [BATCH] * 2, chain, sl.optim.sgd(0.1), rng=1)


MESHES = {
    **{f"stage {stage}": ({"data": 2}, (sl.zero(stage),)) for stage in range(4)},
    "recomputed": ({"data": 2}, (sl.zero(3), sl.remat())),
    "accumulated": ({"data": 2}, (sl.zero(2), sl.accumulate(2))),
    "ring": ({"seq": 2}, (sl.sequence("seq", "ring"), sl.zero(3, axis="seq"))),
    "ulysses": ({"data": 2, "seq": 2}, (sl.sequence("seq"), sl.zero(1), sl.remat())),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_meshes(mesh):
    """Jitter and sampled choices are drawn by a token's index in the global batch. Without drops its routing is its own."""
    alone, found = trained({"data": 1}, sl.zero(0)), trained(MESHES[mesh][0], *MESHES[mesh][1])
    training.assert_same_training(found, alone)


def test_layers_that_are_no_blocks():
    alone, found = trained({"data": 1}, sl.zero(0)), trained({"data": 2}, sl.zero(3), wrap=lambda layer: layer)
    training.assert_same_training(found, alone)

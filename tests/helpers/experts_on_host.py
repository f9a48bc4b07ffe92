"""A small GPT with two layers of eight experts among four, and its parameters."""

import optree
import torch

import shardlib as sl
from shardlib.models import gpt

EXPERTS = 8
ROUTER = sl.nn.routers.top_k(2, renormalise="chosen")
CONFIG = gpt.GPTConfig(
    vocab=64,
    layers=4,
    width=32,
    heads=4,
    sequence=24,
    moe=gpt.Experts((0, EXPERTS), sl.nn.MoEConfig(ROUTER), hidden=32, shared=16),
)


def random_params(config=CONFIG, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def moved(leaf):
        return leaf.to(dtype) + 0.05 * torch.randn(leaf.shape, generator=generator, dtype=dtype)

    return optree.tree_map(moved, gpt.init(config))


def experts_of(params):
    """The leaves of experts."""
    return [leaf for block in params["blocks"] if "moe" in block for leaf in block["moe"]["experts"].values()]

"""Meshes and transforms that cut parameters in every way: shards, copies, pipeline stages, slices."""

from dataclasses import replace

import torch

import shardlib as sl
from helpers.models import TINY, tiny_gpt
from shardlib.models import gpt


def tiny_blocks(**changes):
    """The GPT as a list of blocks in float64."""
    _, params = tiny_gpt(torch.float64, layers=2, **changes)
    return gpt.make_sequential(replace(TINY, dtype=torch.float64, layers=2, **changes)), gpt.to_blocks(params)


CUTS = {
    "stage 0": ({"data": 4}, sl.zero(0)),
    "stage 1": ({"data": 4}, sl.zero(1)),
    "stage 3": ({"data": 3}, sl.zero(3)),
    "hybrid": ({"node": 2, "data": 2}, sl.zero(2, replicate="node")),
    "stages": ({"data": 2, "pipe": 2}, sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))),
    "slices": (
        {"data": 2, "model": 2},
        sl.chain(sl.zero(1), sl.tensor_slicing(gpt.slicing_rules(replace(TINY, vocab=30), blocks=True))),
    ),
    "padded slices": (
        {"data": 2, "model": 4},
        sl.chain(sl.zero(1), sl.tensor_slicing({"0/tokens": "vocab", "3/weight": "vocab"})),
    ),
    "all three": (
        {"data": 2, "pipe": 2, "model": 2},
        sl.chain(
            sl.zero(2),
            sl.pipeline("1f1b", 2),
            sl.tensor_slicing(gpt.slicing_rules(replace(TINY, vocab=30), blocks=True)),
        ),
    ),
}

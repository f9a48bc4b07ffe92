"""Profiles of what a loss computes between its blocks: forward and backward are nobody's."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import shardlib as sl
from shardlib.report.profile.recording import OUTSIDE
from shardlib.report.profile.value import operators_of

ROWS, WIDTH = 4, 8
ONCE = 2 * ROWS * WIDTH * WIDTH  # operations of one product
HEAD = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


@sl.block
def layer(p, x, given=None):
    return torch.tanh(x @ p["w"]) if given is None else torch.tanh(x @ p["w"]) + given


def straight(p, x):
    return layer(p["l"][1], layer(p["l"][0], x @ p["w"]))


def between(p, x):
    return layer(p["l"][1], layer(p["l"][0], x @ p["w"]) @ p["w"])


def shared(p, x):
    """What both blocks are given is computed before them."""
    given = (x @ p["w"]) @ p["w"]
    return layer(p["l"][1], layer(p["l"][0], x @ p["w"], given=given), given=given)


def to_a_module(p, x):
    """A module is given a block's result as it is, and a block the module's."""
    made = functional_call(HEAD, {"0.weight": p["l"][0]["w"]}, (layer(p["l"][1], x @ p["w"]),))
    return layer(p["l"][1], made)


# Products outside of the blocks forward and backward; the first one's input has no gradient.
CASES = {"straight": (straight, 1, 1), "between": (between, 2, 3), "shared": (shared, 3, 4)}


def counted(fn):
    """Name -> operations forward and backward."""
    w = 0.5 * torch.eye(WIDTH)
    params = {"w": w, "l": [{"w": w.clone()} for _ in range(2)]}
    state, step = sl.make_train_step(lambda p, x: fn(p, x).square().mean(), params, sl.optim.sgd(0.1))
    _, found = operators_of(step, state, torch.ones(ROWS, WIDTH))
    ways = {}
    for part, flops in found.flops.items():
        if flops:
            ways.setdefault(part.name, dict.fromkeys(("forward", "backward"), 0))[part.way] += flops / ONCE
    return {name: tuple(of.values()) for name, of in ways.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_is_between_blocks_is_outside_of_them(case):
    fn, *outside = CASES[case]
    assert counted(fn) == {"l/0": (1, 2), "l/1": (1, 2), OUTSIDE: tuple(outside)}


def test_blocks_beside_modules():
    found = counted(to_a_module)
    assert found.pop(OUTSIDE) == (1, 1) and found.pop("l/1") == (2, 4)
    assert [*found.values()] == [(1, 2)]

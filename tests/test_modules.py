"""Any nn.Module as a pure function: its tree, ties and buffers."""

import pytest
import torch
from helpers import training
from helpers.trees import assert_close, assert_same
from oracle import one_device
from torch import nn

import shardlib as sl
from shardlib.errors import TreeError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Tied(nn.Module):
    """An embedding that is also the output layer, in a ModuleDict, with a buffer that stays."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {"embed": nn.Embedding(11, 6), "blocks": nn.ModuleList(nn.Linear(6, 6) for _ in range(2))}
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.parts["embed"].weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        x = self.parts["embed"](tokens)
        for block in self.parts["blocks"]:
            x = x + self.scale * torch.tanh(block(x))
        return self.head(x)


def tied():
    torch.manual_seed(20)
    return Tied()


def test_the_tree_follows_the_module():
    module = tied()
    apply, params = sl.from_module(module)
    assert set(params) == {"parts", "head"} and set(params["parts"]) == {"embed", "blocks"}
    assert isinstance(params["parts"]["blocks"], list) and set(params["parts"]["blocks"][1]) == {"weight", "bias"}
    assert params["head"]["weight"] is params["parts"]["embed"]["weight"]
    assert (
        params["head"]["weight"].data_ptr() == module.head.weight.data_ptr()
        and not params["head"]["weight"].requires_grad
    )
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(apply(params, tokens), module(tokens))
    units = {placement.unit for placement in sl.make_plan(params, sl.abstract_mesh(data=2), stage=3).placements}
    assert units == {"head", "parts/blocks/0", "parts/blocks/1"} or units == {
        "parts",
        "parts/blocks/0",
        "parts/blocks/1",
    }


def test_the_module_itself_stays_as_it_was():
    module = tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = sl.from_module(module)
    changed = {"parts": params["parts"], "head": {"weight": torch.zeros(11, 6)}}
    assert not apply(changed, torch.arange(3)).any()
    assert_same(dict(module.state_dict()), before)
    assert module.head.weight is module.parts["embed"].weight


@STAGES
def test_ties_are_trained_once(stage):
    module = tied().double()
    apply, params = sl.from_module(module)
    batches = [torch.randint(11, (6, 4)) for _ in range(3)]

    def loss_fn(params, tokens):
        return nn.functional.cross_entropy(apply(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    got = training.simulate({"data": 3}, loss_fn, params, batches, sl.zero(stage), training.optimizer(0.3))
    wanted = one_device.train(loss_fn, params, batches, max_norm=0.3)
    assert_close(got[2], wanted[2], 1e-10)
    assert got[2]["head"]["weight"] is got[2]["parts"]["embed"]["weight"]


def test_frozen_parameters_are_said_in_the_plan():
    module = tied()
    module.parts["blocks"][0].requires_grad_(False)
    with pytest.raises(TreeError, match=r"(?s)2 parameters have requires_grad=False.*parts.blocks.0.weight.*sl.freeze"):
        sl.from_module(module)


def test_buffers_that_change_must_be_asked_for():
    apply, params = sl.from_module(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(TreeError, match=r"(?s)changed its buffers.*0.num_batches_tracked.*buffers=True"):
        apply(params, torch.randn(4, 3))

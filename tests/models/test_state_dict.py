"""State dicts of trained modules: names, layouts and values of the module's own."""

import copy

import pytest
import torch
from helpers import training
from helpers.decoders import decoder, label_batches
from helpers.trees import assert_same
from torch import nn
from transformers import AutoModelForCausalLM

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import huggingface

STAGES = pytest.mark.parametrize("stage", range(4))


class Mixed(nn.Module):
    """Tied weights, a module under two names, a parametrization, and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)])
        self.again = self.layers[1]
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", None)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        self.seen = torch.tensor(float(len(tokens)))
        return self.head(self.again(self.layers[0](x)))


@STAGES
def test_a_module_with_its_buffers(stage):
    torch.manual_seed(1)
    module = Mixed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params, buffers = sl.from_module(module, buffers=True)
    assert_same(dict(sl.models.state_dict(module, params)), before)

    def loss_fn(params, buffers, tokens):
        out, buffers = apply(params, buffers, tokens)
        return nn.functional.cross_entropy(out, tokens), buffers

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(), buffers=buffers)
        for _ in range(2):
            state, _ = step(state, torch.tensor([1, 3, 5, mesh.rank]))
        tokens = torch.tensor([2, 4])
        return sl.models.state_dict(module, state.params, state.buffers), apply(
            sl.unshard(state.params), state.buffers, tokens
        )[0]

    other = Mixed()
    other.seen = torch.zeros(())
    for state, wanted in sl.simulate(run, mesh={"data": 2}):
        assert list(state) == list(other.state_dict()) and state["seen"] == 4
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        other.load_state_dict(state)
        torch.testing.assert_close(other(torch.tensor([2, 4])), wanted, rtol=0, atol=0)
    assert_same(dict(module.state_dict()), before)  # the module itself has not moved


@STAGES
def test_a_states_buffers_are_its_modules(stage):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    untrained = {name: value.clone() for name, value in module.state_dict().items()}
    plain = copy.deepcopy(module)
    apply, params, buffers = sl.from_module(module, buffers=True)
    x = torch.randn(8, 3) + 5

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1), buffers=buffers)
        state, _ = step(state, x)
        own = {"1.running_mean": torch.full((2,), 3.0)}
        return [
            sl.models.state_dict(module, state),
            sl.models.state_dict(module, state, own),
            sl.models.state_dict(module, state, {}),
            sl.models.state_dict(module, state.params),
        ]

    plain(x)
    for default, explicit, none, alone in sl.simulate(run, mesh={"data": 2}):
        for name, wanted in plain.named_buffers():
            torch.testing.assert_close(default[name], wanted)
            assert torch.equal(none[name], untrained[name]) and torch.equal(alone[name], untrained[name])
        assert explicit["1.running_mean"].tolist() == [3.0, 3.0]
        assert torch.equal(explicit["1.running_var"], untrained["1.running_var"])
        assert not torch.equal(default["0.weight"], untrained["0.weight"])
        assert_same({"weight": default["0.weight"]}, {"weight": alone["0.weight"]})


@pytest.mark.parametrize("held", [lambda own: {"mine": own}, lambda own: (own, 3)], ids=["a dictionary", "a tuple"])
def test_a_loss_functions_own_buffers_are_refused(held):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    _, params, buffers = sl.from_module(module, buffers=True)
    state, _ = sl.make_train_step(lambda p, b, x: (x, b), params, sl.optim.sgd(0.1), buffers=held(buffers))
    with pytest.raises(TreeError, match=r"(?s)not the buffers of Sequential.*Pass buffers="):
        sl.models.state_dict(module, state)
    assert sl.models.state_dict(module, state, buffers).keys() == module.state_dict().keys()


CASES = [
    ("llama", {"tie": True}, {"data": 2}, sl.zero(3)),
    ("gpt2", {}, {"data": 2, "pipe": 2}, sl.chain(sl.zero(1), sl.pipeline("1f1b", 2))),
    ("gpt2", {"tie": True}, {"data": 2, "model": 2}, sl.zero(2)),
    ("llama", {}, {"pipe": 2, "model": 2}, sl.pipeline("1f1b", 2)),
]


@pytest.mark.parametrize(("kind", "changes", "mesh", "transform"), CASES)
def test_a_decoder_in_blocks_stages_and_slices(kind, changes, mesh, transform, tmp_path):
    original = decoder(kind, **changes)
    module = huggingface.sliceable(copy.deepcopy(original)) if "model" in mesh else original
    assert_same(dict(module.state_dict()), dict(original.state_dict()))
    blocks = huggingface.decoder_blocks(module)
    loss_fn, params = sl.from_module(module, blocks=blocks)
    if "model" in mesh:
        transform = sl.chain(transform, sl.tensor_slicing(huggingface.slicing_rules(module, blocks=True)))
    batches = label_batches(2, 8)

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), training.optimizer())
        share = mesh.coords.get("data", 0), mesh.shape.get("data", 1)
        for batch in batches:
            state, _ = step(state, {name: value.chunk(share[1])[share[0]] for name, value in batch.items()})
        again = huggingface.decoder_blocks(module)  # made anew, in the same way
        return sl.models.state_dict(module, state.params, blocks=again), sl.unshard(state.params)

    states = sl.simulate(run, mesh=mesh)
    for state, trained in states:
        assert list(state) == list(original.state_dict())
        fresh = decoder(kind, **changes)
        fresh.load_state_dict(state)
        with torch.no_grad():
            outcome = loss_fn(trained, batches[0])
            assert fresh(**batches[0], use_cache=False).loss.item() == pytest.approx(
                (outcome.total / outcome.weight).item(), rel=1e-5
            )
        assert not torch.equal(next(iter(state.values())), next(iter(original.state_dict().values())))
    module.save_pretrained(tmp_path, state_dict=dict(states[0][0]))  # which it empties
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(read.state_dict()), dict(states[0][0]))
    module.load_state_dict(states[0][0])  # three projections again, where it is sliceable
    assert_same(dict(module.state_dict()), dict(states[0][0]))


def test_parameters_of_another_module():
    module = decoder("gpt2")
    blocks = huggingface.decoder_blocks(module)
    with pytest.raises(TreeError, match=r"(?s)not the parameters of Linear.*weight: missing"):
        sl.models.state_dict(nn.Linear(2, 2), {"w": torch.ones(2)})
    with pytest.raises(TreeError, match=r"not those of the 6 blocks.*0.transformer.wpe.weight is not among them"):
        sl.models.state_dict(module, sl.from_module(module)[1], blocks=blocks)

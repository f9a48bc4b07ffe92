"""transformers' models on the meta device get their own initial values, and no rank ever holds a whole one."""

import optree
import pytest
import torch
from helpers.architectures import ARCHITECTURES, build
from helpers.live import Live
from helpers.trees import assert_same

import shardlib as sl
from shardlib.models import huggingface
from shardlib.tree import ties


def on_meta(kind, **changes):
    with torch.device("meta"):
        return build(kind, **changes)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_initial_values_are_the_models(kind):
    """Leaf by leaf the constants and the deviations of transformers' own start; buffers; ties."""
    torch.manual_seed(0)
    own = build(kind)
    _, init, buffers = sl.from_module(on_meta(kind), buffers=True)
    params = init()
    made = sl.models.state_dict(own, params, buffers)
    drawn = 0
    for name, wanted in own.named_parameters():
        got = made[name]
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        if wanted.numel() == 1 or wanted.std() == 0:
            assert torch.equal(got, wanted), name
        else:  # the ratio of two deviations of n numbers: 5 standard errors
            assert abs(torch.log(got.std() / wanted.std())) < 5 * wanted.numel() ** -0.5, name
            assert abs(got.mean() - wanted.mean()) < 6 * wanted.std() * (2 / wanted.numel()) ** 0.5, name
            assert not torch.equal(got, wanted)
            drawn += 1
    assert drawn > 5
    assert_same({name: buffers[name] for name, _ in own.named_buffers()}, dict(own.named_buffers()))
    assert ties(optree.tree_leaves(params)) == ties(optree.tree_leaves(sl.from_module(own)[1]))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_the_same_on_every_mesh(stage, blocks):
    module = on_meta("qwen3")
    _, init = sl.from_module(module, blocks=huggingface.decoder_blocks(module) if blocks else None)
    at_once = init()
    head = at_once[-1] if blocks else at_once
    assert abs(head["lm_head"]["weight"].std() - 0.02) < 0.002
    for whole in sl.simulate(lambda mesh: sl.unshard(sl.shard(init, mesh, stage=stage)), mesh={"data": 3}):
        assert_same(whole, at_once)


def test_no_rank_ever_holds_the_model():
    _, init = sl.from_module(on_meta("llama", num_hidden_layers=6, hidden_size=64, intermediate_size=64))
    matrix = 4 * 64 * 64

    def run(mesh):
        with Live() as live:
            sharded = sl.shard(init, mesh, stage=3)
        return live.peak, 4 * sharded.plan.parameters

    for peak, whole in sl.simulate(run, mesh={"data": 4}):
        assert whole > 20 * matrix
        assert whole / 4 <= peak < whole / 4 + 4 * matrix  # its share, and what draws its part of one matrix

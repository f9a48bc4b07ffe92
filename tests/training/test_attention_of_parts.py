"""Attention within a part of the sequence, which trains and is wrong, is refused; what only looks like it is not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.decoders import VOCAB, decoder
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import LossError
from shardlib.models import gpt, huggingface

TOKENS = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
MESH = {"data": 1, "seq": 2}
CONFIG = replace(TINY, sequence=8)
WITHOUT_ATTENTION = {glob: style for glob, style in gpt.slicing_rules(CONFIG).items() if "attn" not in glob}


def cut(kind, rules, stage=0):
    slices = [sl.tensor_slicing(rules, axis="seq")] if kind == "megatron" else []
    return sl.chain(sl.sequence("seq", kind), *slices, sl.zero(stage))


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_of_attention_that_are_whole(stage):
    """They are named, when the plan is made with a loss function and at the first step."""
    loss_fn, params = tiny_gpt(sequence=8)
    transform, (batch,) = cut("megatron", WITHOUT_ATTENTION, stage), token_batches(1, 4, CONFIG)
    message = r"part of the sequence only \(megatron over axis 'seq'\)(.|\n)*blocks/0/attn/qkv/weight\nSlice them"
    with pytest.raises(LossError, match=message):
        sl.make_plan(params, sl.abstract_mesh(data=1, seq=2), transform, loss_fn=loss_fn, batch=batch)

    def run(mesh):
        sl.value_and_grad(loss_fn)(sl.shard(params, mesh, transform), batch)

    with pytest.raises(LossError, match=message):
        sl.simulate(run, mesh=MESH)


def of_transformers(rules, eager=False):
    """The loss of a Llama whose embedding and output layer are cut, and so the sequences between them."""
    model = decoder("llama")
    model.set_attn_implementation("eager" if eager else "sdpa")
    apply, params = sl.from_module(model)
    rules = {**rules(huggingface.slicing_rules(model)), "*embed_tokens": "vocab", "lm_head": "vocab"}

    def loss_fn(params, tokens):
        logits = apply(params, input_ids=tokens, attention_mask=None).logits
        sl.nn.sum_sequence(logits.new_zeros(()))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    sl.simulate(
        lambda mesh: sl.value_and_grad(loss_fn)(sl.shard(params, mesh, cut("megatron", rules)), TOKENS), mesh=MESH
    )


@pytest.mark.parametrize("eager", [False, True])
def test_transformers_attention(eager):
    def whole_attention(rules):
        return {glob: style for glob, style in rules.items() if "self_attn" not in glob}

    with pytest.raises(LossError, match=r"layers/0/self_attn/q_proj/weight\n(.|\n)*v_proj/weight\nSlice them"):
        of_transformers(whole_attention, eager)
    with pytest.raises(LossError, match="Take the sequence's length from a sliced layer's output"):
        of_transformers(dict, eager)


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def mixed(params, x):
    """One layer attends over the whole sequence, and another one calls torch's function."""
    x = heads(F.linear(sl.nn.shard_sequence(x), params["w"]))
    x = sl.nn.attention(x, x, x)
    return sl.nn.sum_sequence(F.scaled_dot_product_attention(x, x, x).square().sum())


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_attention_by_torch_beside_our_own(kind):
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    with pytest.raises(LossError, match=r"Call sl\.nn\.attention for it"):
        sl.simulate(
            lambda mesh: sl.value_and_grad(mixed)(sl.shard({"w": torch.eye(6)}, mesh, cut(kind, {})), x),
            mesh=MESH,
        )


def in_windows(params, x):
    """Attention over the whole sequence, and then in windows that are as long as a rank's part of it."""
    x = F.linear(sl.nn.shard_sequence(x), params["up"]["weight"]).unflatten(-1, (-1, 4)).transpose(1, 2)
    x = sl.nn.attention(x, x, x)
    windows = x.unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1)
    windows = F.scaled_dot_product_attention(windows, windows, windows)
    x = windows.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3).transpose(1, 2).flatten(2)
    return sl.nn.sum_sequence(F.linear(x, params["down"]["weight"]).square().sum())


def test_windows_of_a_whole_sequence_are_no_parts():
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 8, 6), (16, 6), (6, 16))
    x, up, down = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    params = {"up": {"weight": up}, "down": {"weight": down}}
    transform = cut("megatron", {"up": sl.column(heads=4), "down": sl.row(heads=4)})

    def run(mesh):
        loss, grads = sl.value_and_grad(in_windows)(sl.shard(params, mesh, transform), x)
        return loss, sl.unshard(grads)

    loss, grads = sl.value_and_grad(in_windows)(params, x)
    for found in sl.simulate(run, mesh=MESH):
        torch.testing.assert_close(found[0], loss, rtol=1e-10, atol=0)
        assert_close(found[1], grads, 1e-10)

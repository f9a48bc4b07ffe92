"""transformers' GPT-2, Llama and BERT train unmodified under every stage, as on one device; on the meta device they get their
own initial values, and no rank ever holds a whole model."""

import copy
import functools

import optree
import pytest
import torch
from helpers.architectures import ARCHITECTURES, build
from helpers.measure import Live
from helpers.training import assert_same_training, optimizer, simulate
from helpers.trees import assert_same
from oracle import one_device
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    logging,
)

import shardlib as sl
from shardlib.errors import LossError
from shardlib.models import huggingface
from shardlib.tree import ties

logging.set_verbosity_error()
SMALL = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SMALL)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, **SMALL)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            vocab_size=50,
        )
    ),
}
TOKENS = torch.randint(0, 50, (3, 12, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=MODELS)
def trained_alone(request):
    torch.manual_seed(0)
    module = MODELS[request.param]().train()
    with torch.no_grad():  # no bias at zero: softmax ignores a key's, which would then hold rounding noise alone
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    apply, params = sl.from_module(module)

    def loss_fn(params, tokens):
        return apply(params, input_ids=tokens, labels=tokens).loss

    return loss_fn, params, one_device.train(loss_fn, params, list(TOKENS), max_norm=1.0)


@pytest.mark.parametrize("stage", range(4))
def test_same_training(trained_alone, stage):
    loss_fn, params, wanted = trained_alone
    got = simulate({"data": 3}, loss_fn, copy.deepcopy(params), list(TOKENS), sl.zero(stage), optimizer(max_norm=1.0))
    # In fp32: these models compute their own loss in it, whatever the dtype of the weights.
    assert_same_training(got, wanted, 1e-5)


def test_units_are_layers():
    _, params = sl.from_module(MODELS["gpt2"]())
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), stage=3)
    assert set(plan.units) == {"lm_head", "transformer", "transformer/h/0", "transformer/h/1"}
    tied = next(placement for placement in plan.placements if placement.aliases)
    assert {tied.path, *tied.aliases} == {"lm_head/weight", "transformer/wte/weight"}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_models_output_is_aux(stage):
    """Detached, with its class; the cache of keys and values, which is no pytree, is refused."""
    torch.manual_seed(0)
    apply, params = sl.from_module(MODELS["gpt2"]().train())
    tokens = TOKENS[0][:2]

    def loss_fn(params, tokens, **options):
        output = apply(params, input_ids=tokens, labels=tokens, **options)
        return output.loss, output

    wanted = apply(params, input_ids=tokens, use_cache=False).logits

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(functools.partial(loss_fn, use_cache=False), sharded, sl.optim.sgd(0.1))
        aux = step(state, tokens)[1]["aux"]
        assert type(aux).__name__ == "CausalLMOutputWithCrossAttentions" and not aux.loss.requires_grad
        torch.testing.assert_close(aux.logits, wanted.detach(), rtol=1e-5, atol=1e-6)
        assert aux["logits"] is aux.logits and not aux.logits.requires_grad
        with pytest.raises(LossError, match="past_key_values: DynamicCache"):
            sl.value_and_grad(loss_fn)(sl.shard(params, mesh, stage=stage), tokens)

    sl.simulate(run, mesh={"data": 2})


# --- on the meta device ------------------------------------------------------------------------------------------


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

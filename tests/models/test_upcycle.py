"""Dense models that become models with experts: the same function at the start, and copies that part in training."""

import dataclasses

import pytest
import torch
from helpers.decoders import VOCAB, decoder
from helpers.models import shaken
from optree import tree_leaves, tree_map

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import gpt, huggingface
from shardlib.nn import routers

DENSE = gpt.GPTConfig(vocab=29, layers=4, width=12, heads=2, sequence=8, dtype=torch.float64)
ROUTER = routers.top_k(2, renormalise="chosen")
TOKENS = torch.randint(29, (3, 8), generator=torch.Generator().manual_seed(2))


def experts(per_layer=(0, 4), router=ROUTER, kind="gelu_tanh", **options):
    return gpt.Experts(per_layer, sl.nn.MoEConfig(router, kind), **options)


def dense_params():
    return shaken(gpt.init(DENSE), 0.2)


@pytest.mark.parametrize(
    "options", [{}, {"shared": 5}, {"residual": 48}, {"shared": 5, "residual": 48, "balance": True}]
)
@pytest.mark.parametrize("per_layer", [(0, 4), (2,), (0, 2, 0, 3)])
def test_the_dense_models_function(per_layer, options):
    moe, params = experts(per_layer, **options), dense_params()
    config, made = dataclasses.replace(DENSE, moe=moe), sl.models.upcycle(params, moe, sl.Key(3))
    expected = gpt.logits(DENSE, params, TOKENS)
    torch.testing.assert_close(gpt.logits(config, made, TOKENS), expected, rtol=1e-12, atol=1e-12)
    assert all(tree_leaves(tree_map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, made, gpt.init(config))))
    assert made["blocks"][1]["attn"] is params["blocks"][1]["attn"]
    counts = gpt.make_loss(config)(made, {"tokens": TOKENS, "targets": TOKENS})[1]["experts"]
    assert list(counts) == [str(layer) for layer in range(4) if moe.of_layer(layer)]


def test_copies_part_in_training():
    """Each expert sees tokens of its own, so that one step makes them differ. The dense parameters stay as they were."""
    moe, params = experts(load=0.0), dense_params()
    before = [leaf.clone() for leaf in tree_leaves(params)]
    made = sl.models.upcycle(params, moe, sl.Key(3))
    loss_fn = gpt.make_loss(dataclasses.replace(DENSE, moe=moe))
    state, step = sl.make_train_step(loss_fn, sl.shard(made, sl.make_mesh(), stage=3), sl.optim.sgd(0.1))
    ups = sl.unshard(step(state, {"tokens": TOKENS, "targets": TOKENS})[0].params)["blocks"][1]["moe"]["experts"]["up"]
    assert all(not torch.equal(ups[0], up) for up in ups[1:])
    assert all(map(torch.equal, before, tree_leaves(params)))


def test_noise_is_of_all_copies_but_the_first():
    moe = experts((4,))
    made = sl.models.upcycle(dense_params(), moe, sl.Key(3), noise=0.1)["blocks"][2]["moe"]["experts"]
    mlp = dense_params()["blocks"][2]["mlp"]
    assert torch.equal(made["up"][0], mlp["up"]["weight"]) and torch.equal(made["up_bias"][3], mlp["up"]["bias"])
    added = made["down"][1:] - mlp["down"]["weight"]
    assert float(added.std() / mlp["down"]["weight"].std()) == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(added[0], added[1])


def test_it_runs_shard_by_shard():
    moe = experts()

    def make():
        return sl.models.upcycle(dense_params(), moe, sl.Key(3), noise=0.1)

    for found in sl.simulate(lambda mesh: sl.unshard(sl.shard(make, mesh, stage=3)), mesh={"data": 2}):
        assert all(map(torch.equal, tree_leaves(found), tree_leaves(make())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "swiglu"}, "layer 1's MLP is 'gelu_tanh' of the inner width 48"),
        ({"kind": "gelu"}, "the experts are 'gelu'"),
        ({"hidden": 10}, "leave out hidden="),
        ({"residual": 10}, "give it residual=48"),
        ({"per_layer": (0, 0, 2)}, r"\(0, 0, 2\) does not divide 4 layers"),
    ],
)
def test_what_is_no_copy_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sl.models.upcycle(dense_params(), experts(**options), sl.Key(0))


def test_a_model_with_experts_is_refused():
    made = sl.models.upcycle(dense_params(), experts(), sl.Key(0))
    with pytest.raises(ValueError, match=r"layer 1 has no MLP, but .*moe"):
        sl.models.upcycle(made, experts(), sl.Key(0))
    with pytest.raises(TypeError, match="Key"):
        sl.models.upcycle(dense_params(), experts(), 0)


WINDOW = {"use_sliding_window": True, "sliding_window": 3}


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "mistral", "qwen3", "qwen3, window"])
def test_transformers_models(kind):
    changes = {} if "qwen3" in kind else {"head_dim": 4}
    changes |= WINDOW | {"max_window_layers": 0} if "window" in kind else {}
    model = decoder(kind.partition(",")[0], torch.float64, tie="tied" in kind, **changes)
    made = huggingface.upcycle(model, 4, sl.Key(0), per_token=3)
    apply, params = sl.from_module(huggingface.with_experts(made))
    tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))
    # Routers' weights are rounded to fp32, and sum to 1 but for that.
    torch.testing.assert_close(apply(params, input_ids=tokens).logits, model(tokens).logits, rtol=1e-6, atol=1e-6)
    assert made.config.model_type == ("qwen3_moe" if "qwen3" in kind else "mixtral")
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == ("tied" in kind)
    assert made.dtype is torch.float64 and made.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 24, 16)


def test_transformers_models_that_are_refused():
    with pytest.raises(TreeError, match=r"kinds llama, mistral, qwen3, and got GPT2LMHeadModel \(model_type='gpt2'\)"):
        huggingface.upcycle(decoder("gpt2"), 4, sl.Key(0))
    with pytest.raises(TreeError, match=r"MixtralForCausalLM has no model.layers.0.self_attn.q_proj.bias"):
        huggingface.upcycle(decoder("llama", attention_bias=True), 4, sl.Key(0))
    with pytest.raises(ValueError, match="a token uses at least one expert, and at most all"):
        huggingface.upcycle(decoder("llama"), 2, sl.Key(0), per_token=3)
    with pytest.raises(TreeError, match="layers have the sliding windows None, None, 3, 3"):
        huggingface.upcycle(decoder("qwen3", **WINDOW, max_window_layers=2), 4, sl.Key(0))

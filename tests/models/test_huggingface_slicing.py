"""Slicing rules for transformers' models: supported models train as on one device, others are refused with a reason."""

import functools
import re

import pytest
import torch
from helpers import training
from oracle import one_device
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    logging,
)

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition, TreeError
from shardlib.models import huggingface

logging.set_verbosity_error()
SMALL = {
    "vocab_size": 49, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "residual_dropout": 0.0, "sliding_window": 16, "query_pre_attn_scalar": 8,
}  # fmt: skip
TOKENS = torch.randint(3, 49, (4, 8), generator=torch.Generator().manual_seed(1))
# Each with a plan of its own; the others of the same making are tried with them by `make nightly`.
KINDS = ["gpt_neox", "phi", "phi3", "gemma2", "qwen2", "qwen3", "olmo2", "starcoder2", "cohere", "glm4", "apertus"]
MORE = [
    "arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm", "granite", "helium",
    "hyperclovax", "internlm3", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat",
    "nemotron", "olmo", "olmo3", "seed_oss", "smollm3", "vaultgemma",
]  # fmt: skip


@functools.cache
def made(kind, base=False, **changes):
    config = CONFIG_MAPPING[kind]
    known = {name: value for name, value in (SMALL | changes).items() if hasattr(config(), name)}
    torch.manual_seed(0)
    return shaken((AutoModel if base else AutoModelForCausalLM).from_config(config(**known)).double().train())


def shaken(model):
    """No bias at zero: softmax ignores a key's, which would then hold rounding noise alone."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def parts_of(model):
    apply, params = sl.from_module(model)

    def loss_fn(params, tokens):
        return apply(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss_fn, params


def trains(model, rules, ways=2):
    loss_fn, params = parts_of(model)
    wanted = one_device.train(loss_fn, params, [TOKENS], max_norm=1.0)
    got = training.simulate(
        {"model": ways}, loss_fn, params, [TOKENS], sl.tensor_slicing(rules), training.optimizer(1.0)
    )
    # The weights are in float64; losses, norms and rotations these models compute in fp32, whatever those are.
    training.assert_same_training(got, wanted, 1e-5)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in MORE)])
def test_trains_sliced_by_its_rules(kind):
    rules = huggingface.slicing_rules(made(kind))
    assert sum(getattr(rule, "heads", 0) > 0 for rule in rules.values()) > 0 or kind in ("phi3", "olmo2", "olmo3")
    trains(made(kind), rules)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe", "phimoe", "deepseek_v2", "minicpm3"])
def test_unknown_styles_are_refused_by_name(kind):
    config = CONFIG_MAPPING[kind]()
    rules = config.base_model_tp_plan
    with pytest.raises(IllegalComposition, match=r"packed_colwise|mla_kv_a_proj") as error:
        sl.tensor_slicing(rules)
    assert "take out their rules" in str(error.value)
    named = re.findall(r"- (\S+): '", str(error.value))
    sl.tensor_slicing({glob: style for glob, style in rules.items() if glob not in named})


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "stablelm"])
def test_a_model_whose_layers_have_no_plan_is_refused(kind):
    """The first has one for its output layer alone."""
    with pytest.raises(TreeError, match=f"no base_model_tp_plan, and shardlib no rules for '{kind}'; write"):
        huggingface.slicing_rules(made(kind))


def test_a_model_without_a_head_gets_rules_that_all_match():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=49, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    bases = [
        BertModel(config),
        huggingface.sliceable(GPT2Model(GPT2Config(n_layer=1, n_embd=16, n_head=4, vocab_size=49))),
    ]
    bases += [made(kind, base=True) for kind in ("gpt_neox", "llama", "apertus")]
    for base in bases:
        rules = huggingface.slicing_rules(base)
        plan = sl.make_plan(sl.from_module(base)[1], sl.abstract_mesh(model=2), sl.tensor_slicing(rules))
        assert {"column", "row"} <= {style.name for style in plan.styles.values()}
        assert "lm_head" not in rules and "*/decoder" not in rules
    assert any(path.endswith("wte/weight") for path in sl.make_plan(
        sl.from_module(bases[1])[1], sl.abstract_mesh(model=2), sl.tensor_slicing(huggingface.slicing_rules(bases[1]))
    ).styles)  # fmt: skip
    assert "*/decoder" in huggingface.slicing_rules(BertForMaskedLM(config))


def test_heads_come_from_the_configuration():
    config = GPTNeoXConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = GPTNeoXForCausalLM(config)
    rules = huggingface.slicing_rules(model)
    message = r"query_key_value/weight: shape \(48, 16\): 2 heads do not divide over model=4"
    with pytest.raises(IllegalComposition, match=message):
        sl.make_plan(sl.from_module(model)[1], sl.abstract_mesh(model=4), sl.tensor_slicing(rules))


def test_heads_that_a_raw_plan_cuts_are_explained():
    """Two key-value heads over four ranks; then by the rules with heads, and on the axis that these say."""
    model = made("llama")
    with pytest.raises(HandleError) as error:
        trains(model, model.config.base_model_tp_plan, ways=4)
    for message in (
        "invalid for input of size",
        "model/layers/0/self_attn/k_proj/weight: 4 of 16 outputs (axis 'model' of size 4)",
        "sl.column(heads=...)",
        "models.huggingface.slicing_rules",
    ):
        assert message in str(error.value)
    rules = huggingface.slicing_rules(model)
    with pytest.raises(
        IllegalComposition,
        match=r"k_proj/weight: shape \(16, 32\): 2 heads do not divide(.|\n)*With model=2 all rules fit",
    ):
        trains(model, rules, ways=4)


def test_a_gpt2_that_is_not_sliceable():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=4, vocab_size=49, n_positions=8)).double().eval()
    shaken(model)
    with pytest.raises(TreeError, match=r"hard-code their sizes(.|\n)*sliceable\(model\), before"):
        huggingface.slicing_rules(model)
    by_hand = {"*/c_attn": sl.column(transposed=True), "*/attn/c_proj": sl.row(transposed=True)}
    with pytest.raises(
        HandleError, match=r"h/0/attn/c_attn/weight: 24 of 48 outputs(.|\n)*slicing_rules and sliceable"
    ):
        trains(model, by_hand)
    trains(huggingface.sliceable(model), huggingface.slicing_rules(model))


def test_whole_parameters_that_are_used_on_slices():
    """Apertus' plan has no word of its activation's parameters; each rank would train its own."""
    model = made("apertus")
    raw = {glob: style for glob, style in huggingface.slicing_rules(model).items() if "act_fn" not in glob}
    message = (
        r"(?s)gradients of whole parameters differ.*layers/0/mlp/act_fn/alpha_n: along axis 'model'.*the style 'shared'"
    )
    with pytest.raises(HandleError, match=message):
        trains(model, raw)
    trains(model, raw | {"*/act_fn": "shared"})

"""peft's models: the base does not change by a bit, the adapters train as on one device."""

import optree
import pytest
import torch
from helpers import training
from helpers.trees import assert_close
from oracle import one_device
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import shardlib as sl

logging.set_verbosity_error()
WORDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **WORDS)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2, **WORDS)
    ),
}
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
TOKENS = torch.randint(0, 50, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def adapted(kind):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=TARGETS[kind], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(MODELS[kind](), config).train()


@pytest.mark.parametrize(("kind", "stage"), [("gpt2", 0), ("gpt2", 3), ("llama", 1), ("llama", 2), ("llama", 3)])
def test_adapters_train_and_the_base_stays(kind, stage):
    model = adapted(kind)

    def loss_fn(params, tokens):
        return apply(params, input_ids=tokens, labels=tokens).loss

    apply, params, frozen = sl.from_module(model, frozen=True)
    paths = optree.tree_paths(params)
    base = {path for path in paths if "/".join(map(str, path)) in frozen}
    adapters = [path for path in paths if path not in base and "lora_" in "/".join(map(str, path))]
    assert len(adapters) == 2 * 2 * len(TARGETS[kind])
    wanted = one_device.train(loss_fn, params, list(TOKENS), frozen=base, max_norm=1.0)

    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply, params, frozen = sl.from_module(model, frozen=True)
    transform = sl.chain(sl.zero(stage), sl.freeze(frozen))
    got = training.simulate({"data": 2}, loss_fn, params, list(TOKENS), transform, training.optimizer(max_norm=1.0))
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert_close(got[2], wanted[2], 1e-5)
    for path, before, after in zip(paths, optree.tree_leaves(params), optree.tree_leaves(got[2])):
        assert torch.equal(before, after) == (path in base), path
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), transform)
    assert sum(bucket.owned for bucket in plan.trained) < 0.2 * plan.parameters

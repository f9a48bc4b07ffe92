"""peft's models: the base does not change by a bit, the adapters train as on one device."""

import optree
import pytest
import torch
from helpers import training
from helpers.decoders import decoder
from oracle import one_device
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import huggingface
from shardlib.models.huggingface import decoder_blocks

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
    training.assert_same_training(got, wanted, 1e-5)
    for path, before, after in zip(paths, optree.tree_leaves(params), optree.tree_leaves(got[2])):
        assert torch.equal(before, after) == (path in base), path
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), transform)
    assert sum(bucket.owned for bucket in plan.trained) < 0.2 * plan.parameters


def adapted_experts(kind):
    torch.manual_seed(0)
    leaves = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=leaves, init_lora_weights=False)
    return get_peft_model(decoder(kind, num_hidden_layers=2).double(), config).train()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])  # whose experts' matrices lie either way
@pytest.mark.parametrize("how", ["plain", "with_experts", "recomputed"])
def test_adapters_of_experts_leaves(kind, how):
    theirs, tokens = adapted_experts(kind), TOKENS[0, :, :6] % 32
    model = adapted_experts(kind)
    if how == "with_experts":
        model = huggingface.with_experts(model)
    if how == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply, params, frozen = sl.from_module(model, frozen=True)

    def run(mesh, stage):
        transform = sl.chain(sl.zero(stage), sl.freeze(frozen))
        loss_fn = lambda params, tokens: apply(params, tokens, labels=tokens).loss  # noqa: E731
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.sgd(0.5))
        for _ in range(2):
            state, _ = step(state, tokens.chunk(mesh.size)[mesh.rank])
        return sl.models.state_dict(model, state.params)

    optimizer = torch.optim.SGD([leaf for leaf in theirs.parameters() if leaf.requires_grad], 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        theirs(tokens, labels=tokens).loss.backward()
        optimizer.step()
    for mesh, stage in (({"data": 1}, 0), ({"data": 2}, 3)):
        found = sl.simulate(run, stage, mesh=mesh)[0]
        for name, wanted in theirs.state_dict().items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(TreeError, match=r"adapters on experts' leaves \(target_parameters\).* leave sl.experts out"):
        huggingface.expert_rules(model)


def test_adapters_are_not_drawn_as_linear_layers():
    """On the meta device peft's zeros are lost."""
    with torch.device("meta"):
        model = adapted("llama")
    _, params, _ = sl.from_module(model, frozen=True)
    with pytest.raises(
        TreeError, match=r"lost how they start:\n.*q_proj\.lora_A(?s:.*)from_pretrained\(\.\.\., change="
    ):
        sl.shard(params, sl.make_mesh())


def test_blocks_are_those_of_the_model_inside():
    """LoRA's layers take part in layer drop as the model's own do."""
    wrapped = adapted("llama")
    with pytest.raises(TreeError, match=r"this is a PeftModel: give it model.get_base_model\(\)"):
        decoder_blocks(wrapped)
    model = wrapped.get_base_model()
    apply, params, frozen = sl.from_module(model, blocks=decoder_blocks(model), frozen=True)
    drop = sl.progressive_layer_drop(0.1, 1e3)
    state, train_step = sl.make_train_step(
        apply, sl.shard(params, sl.make_mesh(), sl.chain(drop, sl.freeze(frozen))), sl.optim.sgd(1.0), rng=0
    )
    trained = []
    for tokens in (*TOKENS, *TOKENS):
        before = optree.tree_map(torch.clone, sl.unshard(state.params))
        state, _ = train_step(state, {"input_ids": tokens, "labels": tokens})
        after = optree.tree_map(torch.clone, sl.unshard(state.params))
        trained.append([not torch.equal(a, b) for a, b in zip(optree.tree_leaves(before), optree.tree_leaves(after))])
    paths = ["/".join(map(str, path)) for path in optree.tree_paths(params)]
    moved = [{path.split("/")[0] for path, moves in zip(paths, step) if moves} for step in trained]
    assert moved[0] == {"1", "2"} and all("lora_" in path or not any(m) for path, *m in zip(paths, *trained))
    assert any(step < {"1", "2"} for step in moved[1:])


def test_generate_takes_no_adapters():
    wrapped = adapted("llama")
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(TreeError, match=r"takes no adapters of peft: take model.merge_and_unload\(\)"):
            sl.generate(model, {}, [[1, 2]], max_new=1)
    merged = wrapped.merge_and_unload()
    found = sl.generate(merged, sl.from_module(merged.requires_grad_(True))[1], [[1, 2]], max_new=2, temperature=0)
    assert len(found[0]) == 2

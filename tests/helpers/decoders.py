"""transformers' decoders, small, and the whole model's own loss over the parameters of its blocks."""

import optree
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

import shardlib as sl
from shardlib.models import huggingface

logging.set_verbosity_error()
VOCAB, LENGTH = 32, 8
# Heads in groups: twice as many for queries as for keys and values.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MAKE = {
    "llama": lambda **changes: LlamaForCausalLM(LlamaConfig(**SIZES | changes)),
    "mistral": lambda **changes: MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": 3} | changes)),
    "qwen2": lambda **changes: Qwen2ForCausalLM(Qwen2Config(**SIZES | WINDOWS | changes)),
    "qwen3": lambda **changes: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 4} | changes)),
    "gpt2": lambda **changes: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_head=4, n_layer=4, n_positions=LENGTH, **NO_DROPOUT | changes)
    ),
}
# Models with layers of experts: what their config is to differ in.
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 4, "moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": LATENT | {
        "num_key_value_heads": 8, "moe_intermediate_size": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
    "gpt_oss": {"head_dim": 4, "num_local_experts": 4, "sliding_window": 3},
}  # fmt: skip


def with_experts(kind):
    def make(**changes):
        config = AutoConfig.for_model(kind, **SIZES | {"num_experts_per_tok": 2} | EXPERTS[kind] | changes)
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")

    return make


MAKE |= {kind: with_experts(kind) for kind in EXPERTS}


def decoder(kind, dtype=torch.float32, *, tie=False, **changes):
    """A model whose values depend on nothing but this; none starts at 0 or 1, so that none has a vanishing scale."""
    module = MAKE[kind](tie_word_embeddings=tie, **changes).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((1 if "norm" in name or "ln_" in name else 0) + 0.2 * drawn)
    return module


def in_float64(module):
    """The same with torch's own norms: transformers' RMSNorm rounds to fp32, whatever the dtype of what it is given."""
    for parent in list(module.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                own = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
                own.weight = norm.weight
                setattr(parent, name, own)
    return module.double()


def cut(module):
    return sl.from_module(module, blocks=huggingface.decoder_blocks(module))


def whole_loss(module):
    """The loss of the whole model as a function of the same list of trees, which `cut` must equal."""

    def loss_fn(params, batch):
        named = names(params)
        if next(iter(named.values())).dtype is torch.float32:
            return functional_call(module, named, kwargs=batch | {"use_cache": False}, tie_weights=False).loss
        # transformers' own loss rounds to fp32.
        inputs = {name: value for name, value in batch.items() if name != "labels"} | {"use_cache": False}
        scores = functional_call(module, named, kwargs=inputs, tie_weights=False).logits
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return loss_fn


def names(trees):
    """The trees' leaves by the names that they have in the whole model: a layer is number 0 of its own block."""
    named = {}
    for block, tree in enumerate(trees):
        for path, leaf in zip(optree.tree_paths(tree), optree.tree_leaves(tree)):
            if path[1] in ("layers", "h"):
                path = (*path[:2], block - 1, *path[3:])
            named[".".join(map(str, path))] = leaf
    return named


def label_batches(steps, rows, optional=()):
    """One global batch per step; about a quarter of the labels do not count, more in some rows than in others.

    ``optional``: "attention_mask" with padding on either side, "position_ids" of two documents to a row.
    """
    generator = torch.Generator().manual_seed(6)
    batches = []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
        left_out = torch.rand(rows, LENGTH, generator=generator) < torch.rand(rows, 1, generator=generator) / 2
        batch = {"input_ids": ids, "labels": ids.masked_fill(left_out, -100)}
        positions = torch.arange(LENGTH).expand(rows, -1)
        if "attention_mask" in optional:
            long = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
            odd = (torch.arange(rows) % 2).bool()[:, None]
            batch["attention_mask"] = torch.where(odd, positions < long, positions >= LENGTH - long).long()
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        if "position_ids" in optional:
            first = torch.randint(2, LENGTH - 1, (rows, 1), generator=generator)
            batch["position_ids"] = torch.where(positions < first, positions, positions - first)
        batches.append(batch)
    return batches

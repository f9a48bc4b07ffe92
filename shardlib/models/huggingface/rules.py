"""Rules for tensor slicing of transformers' models, and replacements for layers that hard-code their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from shardlib.collectives.styles.base import Style
from shardlib.errors import TreeError
from shardlib.models.huggingface.decoders import decoder_of
from shardlib.models.huggingface.experts import EXPERTS
from shardlib.models.peft import is_adapted_parameter
from shardlib.transforms.tensor_slicing import column, matches_rule, row

Rules = dict[str, str | Style]


def slicing_rules(module: nn.Module, blocks: bool = False) -> Rules:
    """Rules for `shardlib.tensor_slicing` of a transformers model: the model's own plan, with the heads that must stay whole.

    Supported are models with a ``base_model_tp_plan`` (Llama and similar ones), BERT and RoBERTa, and GPT-2 (made
    `sliceable`), with a head or without one. If the embedding is tied to the output layer, both have the style "vocab". The
    numbers of heads come from the configuration, and every rule matches parameters of the model. Layers of experts are left
    whole; `shardlib.experts` deals them out by `expert_rules`.

    Args:
        blocks: whether the rules are for parameters that `decoder_blocks` made. Then the vocabulary is sliced too, in
            embedding and output layer, and logits are never gathered.

    Raises:
        TreeError: the model has no plan and is none of these, is a GPT-2 that is not `sliceable`, or, with ``blocks``, is
            none that `decoder_blocks` can cut.
    """
    if not blocks:
        return _of_whole(module)
    words = decoder_of(module).words
    rules = _of_whole(module)
    rules.pop("lm_head", None)  # its outputs would be gathered
    return rules | {f"*/{words}": "vocab", "*/lm_head": "vocab"}


def expert_rules(module: nn.Module) -> tuple[str, ...]:
    """Rules for `shardlib.experts` of a transformers model: the leaves of its own expert-parallel plan.

    The model's experts must be computed by `with_experts`, which sends tokens to them.

    Raises:
        TreeError: the model has no ``base_model_ep_plan``, or peft's adapters on experts' leaves.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> huggingface.expert_rules(model)
    ('*layers/*/mlp/experts/gate_up_proj', '*layers/*/mlp/experts/down_proj')
    """
    wrappers: list[Any] = [child for child in module.modules() if is_adapted_parameter(child)]
    if any(hasattr(wrapper.get_base_layer(), EXPERTS) for wrapper in wrappers):
        raise TreeError(
            f"{type(module).__name__} has adapters on experts' leaves (target_parameters), which are not dealt out: leave "
            "sl.experts out of the plan, or adapt other modules"
        )
    config: Any = module.config
    plan: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    rules = tuple(f"*{glob.replace('.', '/')}" for glob, style in plan.items() if style == "grouped_gemm")
    if not rules:
        raise TreeError(
            f"{type(module).__name__} has no base_model_ep_plan; name leaves: sl.experts(rules='*/experts/*')"
        )
    return rules


def _of_whole(module: nn.Module) -> Rules:
    config: Any = module.config
    if config.model_type == "gpt2":
        rules = _gpt2(module, config.num_attention_heads)
    elif config.model_type in ("bert", "roberta"):
        rules = _bert(config.num_attention_heads)
    else:
        rules = _of_plan(module, config)
    paths = [name.replace(".", "/") for name, _ in module.named_parameters(remove_duplicate=False)]
    return {glob: style for glob, style in rules.items() if any(matches_rule(path, glob) for path in paths)}


def _of_plan(module: nn.Module, config: Any) -> Rules:
    plan: dict[str, str] = {
        **(getattr(config, "base_model_tp_plan", None) or {}),
        **(getattr(module, "_tp_plan", None) or {}),
    }
    if not plan.keys() - {"lm_head"}:
        raise TreeError(
            f"{type(module).__name__} has no base_model_tp_plan, and shardlib no rules for {config.model_type!r}; write "
            "them: sl.tensor_slicing({'*/up': 'column', '*/down': 'row', ...})"
        )
    # Experts are left whole: their gate and up are one tensor, and a slice of both is no slice of it.
    whole = [glob for glob, style in plan.items() if style == "moe_tp_experts"]
    plan = {glob: style for glob, style in plan.items() if not any(f"{glob}.".startswith(f"{of}.") for of in whole)}
    rules: Rules = {glob: _by_heads(glob, style, config) for glob, style in plan.items()}
    rules["*/mlp/act_fn"] = "shared"  # parameters of an activation function (Apertus has some) are applied to slices
    if "lm_head" in rules and getattr(config, "tie_word_embeddings", False):
        rules["lm_head"] = "vocab"  # embedding and output layer are one tensor, which has one style
    return rules


def _by_heads(glob: str, style: str, config: Any) -> str | Style:
    """The rule of a plan for ``glob``, with the number of heads if it is a layer of attention."""
    parent, layer = glob.split(".")[-2:] if "." in glob else ("", glob)
    heads = getattr(config, "num_attention_heads", None)
    if parent not in ("self_attn", "attention") or not isinstance(heads, int):
        return style
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "query_key_value": heads}
    if style == "colwise" and layer in outputs:
        return column(heads=outputs[layer])
    if style == "rowwise" and layer in ("o_proj", "dense"):
        return row(heads=heads)
    return style


def _bert(heads: int) -> Rules:
    return {
        "*/attention/self/*": column(heads=heads),
        "*/attention/output/dense": row(heads=heads),
        "*/intermediate/dense": "column",
        "*/layer/*/output/dense": "row",
        "*/word_embeddings": "vocab",
        "*/decoder": "vocab",
    }


def _gpt2(module: nn.Module, heads: int) -> Rules:
    if any(type(layer).__name__ == "Conv1D" for layer in module.modules()):
        raise TreeError(
            f"{type(module).__name__}'s projections hard-code their sizes; replace them first: model = "
            "shardlib.models.huggingface.sliceable(model), before slicing_rules and sl.from_module"
        )
    return {
        "*/attn/c_attn/*": column(heads=heads, transposed=True),
        "*/attn/c_proj": row(heads=heads, transposed=True),
        "*/mlp/c_fc": column(transposed=True),
        "*/mlp/c_proj": row(transposed=True),
        "*wte": "vocab",
    }


def sliceable(module: nn.Module) -> nn.Module:
    """Replaces, in place, the projections of a GPT-2, which hard-code sizes, by equal ones that do not; returns the module.

    The packed query, key and value projection ``c_attn`` becomes three (``c_attn.query``, ``.key``, ``.value``), so that
    each can be sliced by heads; state dicts still have the packed one. Other models are returned unchanged. Call it before
    `from_module`.
    """
    if getattr(getattr(module, "config", None), "model_type", "") != "gpt2":
        return module
    layer: Any
    for child in list(module.modules()):
        for name, layer in list(child.named_children()):
            if type(layer).__name__ == "Conv1D":
                replacement = _QueryKeyValue(layer) if name == "c_attn" else _Projection(layer.weight, layer.bias)
                setattr(child, name, replacement)
    return module


class _Projection(nn.Module):
    """``x @ weight + bias`` with a weight (in, out) of any size."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).unflatten(0, x.shape[:-1])


class _QueryKeyValueSplit(NamedTuple):
    """Query, key and value, in place of the packed tensor that GPT-2 calls ``split`` on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def split(self, size: int, dim: int) -> _QueryKeyValueSplit:
        return self


class _QueryKeyValue(nn.Module):
    def __init__(self, packed: nn.Module) -> None:
        super().__init__()
        weights = packed.weight.detach().chunk(3, dim=1)  # type: ignore[operator]
        biases = packed.bias.detach().chunk(3)  # type: ignore[operator]
        self.query, self.key, self.value = (
            _Projection(weight.contiguous(), bias.clone()) for weight, bias in zip(weights, biases, strict=True)
        )
        self.register_state_dict_post_hook(_packed)
        self.register_load_state_dict_pre_hook(_unpacked)

    def forward(self, x: torch.Tensor) -> _QueryKeyValueSplit:
        return _QueryKeyValueSplit(self.query(x), self.key(x), self.value(x))


_LEAVES = ("weight", "bias")


def _packed(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    """Packs query, key and value in a state dict into the tensors of the packed projection."""
    for leaf in _LEAVES:
        state[prefix + leaf] = torch.cat(
            [state.pop(f"{prefix}{name}.{leaf}") for name in _QueryKeyValueSplit._fields], dim=-1
        )


def _unpacked(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    """The inverse of `_packed`."""
    for leaf in _LEAVES:
        if prefix + leaf in state:
            chunks = state.pop(prefix + leaf).chunk(3, dim=-1)
            state |= {
                f"{prefix}{name}.{leaf}": chunk for name, chunk in zip(_QueryKeyValueSplit._fields, chunks, strict=True)
            }

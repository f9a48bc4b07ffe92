"""Sparse upcycling of transformers' decoders: Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from shardlib import init
from shardlib.errors import TreeError
from shardlib.models.decoding.cache import Windows, by_layer, everywhere, nowhere
from shardlib.models.upcycle import copies
from shardlib.rng import Key, require_key

# A dense model's kind -> the kind with experts, what the latter's configuration calls things, and the former's windows.
_KINDS: dict[str, tuple[str, dict[str, str], dict[str, Any], Windows]] = {
    "llama": ("mixtral", {"number": "num_local_experts"}, {}, nowhere),
    "mistral": ("mixtral", {"number": "num_local_experts"}, {}, everywhere),
    "qwen3": (
        "qwen3_moe",
        {"number": "num_experts", "hidden": "moe_intermediate_size"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        by_layer,
    ),
}
# Settings that the new kind has of its own, or does not read.
_OF_THE_KIND = ("model_type", "architectures", "layer_types", "max_window_layers", "use_sliding_window")
_MLP = re.compile(r"(.*\.mlp\.)(gate|up|down)_proj\.weight$")


def upcycle(model: Any, experts: int, key: Key, *, per_token: int = 2, noise: float = 0.0, std: float = 0.02) -> Any:
    """A transformers model with experts, made of a dense one: each expert is a copy of the layer's MLP.

    The routers of these models renormalise the weights of a token's choices, so without ``noise`` the new model computes what
    the dense one did. A ``LlamaForCausalLM`` or ``MistralForCausalLM`` becomes a ``MixtralForCausalLM``, a
    ``Qwen3ForCausalLM`` a ``Qwen3MoeForCausalLM``, for `from_module`, `with_experts` and ``save_pretrained``.

    Args:
        experts: of each layer.
        key: by which routers, from N(0, std²), and noise are drawn.
        per_token: how many experts each token uses.
        noise: as in `shardlib.models.upcycle`.

    Raises:
        TreeError: a model of another kind, or one with biases or with sliding windows in some layers only, which the new
            kind does not have.
        ValueError: more experts per token than there are.
        TypeError: a ``key`` that is no key.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    >>> type(huggingface.upcycle(LlamaForCausalLM(LlamaConfig(**sizes)), 4, sl.Key(0))).__name__
    'MixtralForCausalLM'
    """
    require_key("upcycle", "key", key)
    dense = getattr(getattr(model, "config", None), "model_type", None)
    if dense not in _KINDS or not hasattr(model, "lm_head"):
        raise TreeError(
            f"upcycle takes transformers' causal language models of the kinds {', '.join(_KINDS)}, and got "
            f"{type(model).__name__} (model_type={dense!r})"
        )
    if not 1 <= per_token <= experts:
        raise ValueError(
            f"upcycle(experts={experts}, per_token={per_token}): a token uses at least one, and at most all"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, names, fixed, windows = _KINDS[dense]
    own = {name: value for name, value in model.config.to_dict().items() if name not in _OF_THE_KIND}
    window = _window(windows(model.config))
    own |= {"sliding_window": window, "use_sliding_window": window is not None}
    sizes = {names["number"]: experts, "num_experts_per_tok": per_token}
    if "hidden" in names:
        sizes[names["hidden"]] = model.config.intermediate_size
    config = AutoConfig.for_model(kind, **own | fixed | sizes)
    state = _state(model.state_dict(), experts, key, noise, std)
    like = next(model.parameters())
    made = AutoModelForCausalLM.from_config(config, dtype=like.dtype).to(like.device)
    missing, unexpected = made.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise TreeError(
            f"upcycle: {type(made).__name__} has no {', '.join(unexpected) or 'other leaves'}"
            f"{', and needs ' + ', '.join(missing) if missing else ''}; make the dense model without biases"
        )
    return made


def _window(windows: Sequence[int | None]) -> int | None:
    """The window of all layers."""
    if len(set(windows)) > 1:
        raise TreeError(
            f"upcycle: layers have the sliding windows {', '.join(map(str, windows))}, and a kind with experts has one for "
            "all; make a dense model whose layers all have the same, or none"
        )
    return windows[0]


def _state(dense: dict[str, torch.Tensor], experts: int, key: Key, noise: float, std: float) -> dict[str, torch.Tensor]:
    """The state dict of the model with experts."""
    state, by_layer = {}, dict[str, dict[str, torch.Tensor]]()
    for name, leaf in dense.items():
        found = _MLP.match(name)
        if found is None:
            state[name] = leaf
        else:
            by_layer.setdefault(found[1], {})[found[2]] = leaf
    for prefix, mlp in by_layer.items():
        own = key.fold_in(prefix)
        copied = {name: copies(leaf, experts, own.fold_in(name), noise) for name, leaf in mlp.items()}
        like = mlp["up"]
        router = init.normal(own, (experts, like.shape[1]), std, dtype=like.dtype, device=like.device)
        state[f"{prefix}gate.weight"] = router
        state[f"{prefix}experts.gate_up_proj"] = torch.cat([copied["gate"], copied["up"]], 1)
        state[f"{prefix}experts.down_proj"] = copied["down"]
    return state

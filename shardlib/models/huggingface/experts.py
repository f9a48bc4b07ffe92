"""transformers' layers of experts, computed by `shardlib.nn.run_experts`; and dense models of transformers made sparse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib import init
from shardlib.errors import HandleError, TreeError
from shardlib.models.decoding.decoder import Windows, by_layer, everywhere, nowhere
from shardlib.models.experts import copies
from shardlib.nn.moe import routers
from shardlib.nn.moe.experts import Product, run_experts
from shardlib.nn.moe.routing import Routing
from shardlib.rng import Key, require_key

_NAME = "shardlib"
EXPERTS = "_is_expert_parallel"  # an attribute of the layers of experts whose implementation can be chosen
_COUNTS, _BIAS, _ROUTER = "counts", "gate.e_score_correction_bias", "places_of_experts"
_OUTPUTS = "whole_gate_up"  # an attribute of a layer: the width of its gate and up projections together
_HALVES = (
    "{layer} has gate and up projections one after the other in gate_up_proj, which tensor_slicing cuts as one matrix. Deal "
    "experts out with sl.experts(rules=huggingface.expert_rules(model))"
)


def with_experts(model: Any, *, counts: bool = False, seats: bool = False, replicas: bool = False) -> Any:
    """Makes a transformers model compute its layers of experts by `shardlib.nn.run_experts`.

    Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS and others: all models whose experts have an implementation to
    choose. The routers, parameters and their names stay as they are. The model is changed in place and returned; call this
    before `shardlib.from_module`. Without it these models train too, by loops or by torch's ``grouped_mm``; with it they take
    any widths and dtypes, experts may lie on other ranks (`shardlib.experts`), and a layer that `shardlib.remat` recomputes
    takes over the choices of its first run. `shardlib.tensor_slicing` does not cut such experts where two projections lie one
    after the other in a leaf ("gate_up_proj").

    Args:
        counts: whether each layer adds up the assignments to its experts in a buffer "counts", for `balanced` and for
            metrics. It comes out of ``sl.from_module(model, buffers=True)``, and is no part of the model's state dict.
        seats: whether each layer gets a parameter "router.seats" beside its "experts", so that `shardlib.relayout` can move
            them between ranks. Layers are named by the paths in which these lie, such as "model/layers/0/mlp". The state dict
            has the seats too, and after ``sl.relayout(state)`` they are the experts' own numbers.
        replicas: whether it gets "router.replicas" as well, for the spare slots of `shardlib.experts`.

    Raises:
        TreeError: the model has no layers of experts with an implementation to choose.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> apply, params = sl.from_module(huggingface.with_experts(model))
    >>> apply(params, torch.zeros(2, 8, dtype=torch.int64)).logits.shape
    torch.Size([2, 8, 32])
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, EXPERTS)}
    if not layers:
        raise TreeError(
            f"{type(model).__name__} has no layers of experts with set_experts_implementation; write them with sl.nn.moe"
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _run)
    model.set_experts_implementation(_NAME)
    for name, layer in layers.items():
        if layer.has_gate:
            setattr(layer, _OUTPUTS, layer.gate_up_proj.shape[2 if layer.is_transposed else 1])
        if seats or replicas:
            _add_placement(model.get_submodule(name.rpartition(".")[0]), layer, seats, replicas)
        if counts:
            weight = next(layer.parameters())
            where = "cpu" if weight.is_meta else weight.device  # on the meta device too, the buffer has a value
            zeros = torch.zeros(layer.num_experts, dtype=torch.float64, device=where)
            layer.register_buffer(_COUNTS, zeros, persistent=False)
    return model


def _add_placement(around: nn.Module, layer: Any, seats: bool, replicas: bool) -> None:
    """Give a layer of experts its seats and replicas. They lie in the module "router" beside it, which some models have."""
    router: nn.Module | None = getattr(around, "router", None)
    if router is None:
        router = around.router = nn.Module()
    if seats:
        router.register_parameter("seats", nn.Parameter(torch.arange(layer.num_experts), requires_grad=False))
    if replicas:
        router.register_parameter("replicas", nn.Parameter(torch.full((layer.num_experts,), -1), requires_grad=False))
    layer.__dict__[_ROUTER] = router  # not as a submodule, under which its parameters would be experts' leaves


def balanced(buffers: Mapping[str, torch.Tensor | None], rate: float = 1e-3) -> dict[str, torch.Tensor | None]:
    """The buffers of the next step: DeepSeek-V3's biases moved by the counts, and these 0 (arXiv 2412.19437, section 2.1.2).

    ``state.buffers = huggingface.balanced(state.buffers)`` after a step, on every rank; buffers are averaged over ranks.

    Args:
        buffers: of a model made by ``with_experts(model, counts=True)``.
        rate: what a bias moves by; see `shardlib.nn.routers.balanced`.

    Raises:
        TreeError: there are no counts beside a bias.

    >>> buffers = {"mlp.experts.counts": torch.tensor([3.0, 1.0]), "mlp.gate.e_score_correction_bias": torch.zeros(2)}
    >>> from shardlib.models import huggingface
    >>> huggingface.balanced(buffers, rate=0.5)["mlp.gate.e_score_correction_bias"]
    tensor([-0.5000,  0.5000])
    """
    end = f"experts.{_COUNTS}"
    pairs = {name: f"{name.removesuffix(end)}{_BIAS}" for name in buffers if name.endswith(end)}
    found = {name: (counts, buffers.get(bias)) for name, bias in pairs.items() if (counts := buffers[name]) is not None}
    after: dict[str, torch.Tensor | None] = {}
    for name, (counts, bias) in found.items():
        if bias is not None:
            after[pairs[name]] = routers.balanced(bias, counts, rate)
            after[name] = torch.zeros_like(counts)
    if not after:
        raise TreeError(
            f"balanced moves buffers {_BIAS!r} by counts, and these have none: call with_experts(model, counts=True) before "
            "sl.from_module(model, buffers=True)"
        )
    return {**buffers, **after}


def _run(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' outputs ``[T, W]`` as transformers calls for them: choices and their weights are ``[T, k]``."""

    def expert(params: Mapping[str, torch.Tensor], rows: torch.Tensor, product: Product) -> torch.Tensor:
        def layer(name: str, rows: torch.Tensor) -> torch.Tensor:
            weight = params[f"{name}_proj"]
            return product(rows, weight.mT if self.is_transposed else weight, params.get(f"{name}_proj_bias"))

        if self.has_gate:
            both = layer("gate_up", rows)
            if self.is_concatenated and both.shape[-1] != getattr(self, _OUTPUTS):
                raise HandleError(_HALVES.format(layer=type(self).__name__))
            hidden = self._apply_gate(both)
        else:
            hidden = self.act_fn(layer("up", rows))
        y = layer("down", hidden)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    routing = Routing.of(top_k_index, top_k_weights, self.num_experts)
    if _COUNTS in self._buffers:
        setattr(self, _COUNTS, getattr(self, _COUNTS) + routing.counts)
    params = {name: getattr(self, name) for name, leaf in self.named_parameters(recurse=False)}
    router = self.__dict__.get(_ROUTER)
    places = {name: getattr(router, name, None) for name in ("seats", "replicas")}
    return run_experts(params, hidden_states, routing, expert, **places).to(hidden_states.dtype)


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
        raise ValueError(f"upcycle({experts=}, {per_token=}): a token uses at least one expert, and at most all")
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, names, fixed, windows = _KINDS[dense]
    own = {name: value for name, value in model.config.to_dict().items() if name not in _OF_THE_KIND}
    window, *others = windows(model.config)
    if set(others) - {window}:
        raise TreeError(
            f"upcycle: layers have the sliding windows {', '.join(map(str, [window, *others]))}, and a kind with experts has "
            "one. Make a dense model whose layers all have the same, or none"
        )
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


def _state(dense: dict[str, torch.Tensor], experts: int, key: Key, noise: float, std: float) -> dict[str, torch.Tensor]:
    """The state dict of the model with experts."""
    state, layers = {}, dict[str, dict[str, torch.Tensor]]()
    for name, leaf in dense.items():
        found = _MLP.match(name)
        if found is None:
            state[name] = leaf
        else:
            layers.setdefault(found[1], {})[found[2]] = leaf
    for prefix, mlp in layers.items():
        own = key.fold_in(prefix)
        copied = {name: copies(leaf, experts, own.fold_in(name), noise) for name, leaf in mlp.items()}
        like = mlp["up"]
        router = init.normal(own, (experts, like.shape[1]), std, dtype=like.dtype, device=like.device)
        state[f"{prefix}gate.weight"] = router
        state[f"{prefix}experts.gate_up_proj"] = torch.cat([copied["gate"], copied["up"]], 1)
        state[f"{prefix}experts.down_proj"] = copied["down"]
    return state

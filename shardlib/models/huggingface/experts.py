"""transformers' layers of experts, computed by `shardlib.nn.run_experts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardlib.errors import TreeError
from shardlib.nn.moe.config import Product
from shardlib.nn.moe.experts import run_experts
from shardlib.nn.moe.routing import Routing

_NAME = "shardlib"


def with_experts(model: Any) -> Any:
    """Makes a transformers model compute its layers of experts by `shardlib.nn.run_experts`.

    Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS and others: all models whose experts have an implementation to
    choose. The routers, parameters and their names stay as they are. The model is changed in place and returned; call this
    before `shardlib.from_module`. Without it these models train too, by loops or by torch's ``grouped_mm``; with it they take
    any widths and dtypes, experts may lie on other ranks (`shardlib.experts`), and a layer that `shardlib.remat` recomputes
    takes over the choices of its first run.

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
    if not any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        raise TreeError(
            f"{type(model).__name__} has no layers of experts whose implementation can be chosen (transformers' "
            "set_experts_implementation); write them with sl.nn.moe"
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _run)
    model.set_experts_implementation(_NAME)
    return model


def _run(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' outputs ``[T, W]`` as transformers calls for them: choices and their weights are ``[T, k]``."""

    def expert(params: Mapping[str, torch.Tensor], rows: torch.Tensor, product: Product) -> torch.Tensor:
        def layer(name: str, rows: torch.Tensor) -> torch.Tensor:
            weight = params[f"{name}_proj"]
            return product(rows, weight.mT if self.is_transposed else weight, params.get(f"{name}_proj_bias"))

        if self.has_gate:
            hidden = self._apply_gate(layer("gate_up", rows))
        else:
            hidden = self.act_fn(layer("up", rows))
        y = layer("down", hidden)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    params = {name: getattr(self, name) for name, leaf in self.named_parameters(recurse=False)}
    routing = Routing.of(top_k_index, top_k_weights, self.num_experts)
    return run_experts(params, hidden_states, routing, expert).to(hidden_states.dtype)

"""Mixtral and Qwen3-MoE of transformers as a `Decoder`: a Llama with layers of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.models.decoding.llama import Llama
from shardlib.models.decoding.products import linear
from shardlib.models.decoding.windows import Windows
from shardlib.nn.moe.config import Product
from shardlib.nn.moe.experts import run_experts
from shardlib.nn.moe.routing import Routing


class Mixtral(Llama):
    """A Mixtral or a Qwen3-MoE, some layers of which may have an MLP. Under `shardlib.experts` tokens travel to experts.

    Raises:
        TreeError: settings that this does not compute.
    """

    products: tuple[str, ...] = (*Llama.products, "model/layers/*/mlp/experts/*_proj")

    def __init__(self, model: Any, windows: Windows) -> None:
        super().__init__(model, windows)
        self._choices = model.config.num_experts_per_tok
        self._renormalises = getattr(model.config, "norm_topk_prob", True)  # Mixtral always does

    def _mlp(self, params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        if "experts" not in params:
            return super()._mlp(params, x)
        weights, experts = self._routed(params, x)
        if self._renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        routing = Routing.of(experts, weights, len(params["gate"]["weight"]))
        return run_experts(params["experts"], x, routing, _expert).to(x.dtype)

    def _routed(self, params: Mapping[str, Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The probabilities of the chosen experts, and their numbers, ``[T, k]``."""
        probabilities, experts = linear(params["gate"], x).float().softmax(-1).topk(self._choices, -1)
        return probabilities, experts

    def layers_of_experts(self, params: Any) -> list[Mapping[str, Any]]:
        return [layer["mlp"] for layer in params["model"]["layers"] if "experts" in layer["mlp"]]

    def choices(self, layer: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return self._routed(layer, x)[1]


def _expert(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    gate, up = product(rows, params["gate_up_proj"]).chunk(2, -1)
    return product(F.silu(gate) * up, params["down_proj"])

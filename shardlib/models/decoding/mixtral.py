"""Mixtral and Qwen3-MoE of transformers as a `Decoder`: a Llama with layers of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.kernels.decoder_mlp import MLP, ChosenExperts, decoder_mlp
from shardlib.kernels.thin_matmul import Linear, QuantizedMatrix
from shardlib.models.decoding.decoder import Windows
from shardlib.models.decoding.llama import Llama
from shardlib.nn.moe.experts import Product, run_experts
from shardlib.nn.moe.placement import ShardedExperts
from shardlib.nn.moe.routing import Routing


class Mixtral(Llama):
    """A Mixtral or a Qwen3-MoE, some layers of which may have an MLP. Under `shardlib.experts` tokens travel to experts.
    Raises `TreeError`: settings that this does not compute."""

    products: tuple[str, ...] = (*Llama.products, "model/layers/*/mlp/experts/*_proj")

    def __init__(self, model: Any, windows: Windows) -> None:
        super().__init__(model, windows)
        self._choices = model.config.num_experts_per_tok
        self._renormalises = getattr(model.config, "norm_topk_prob", True)  # Mixtral always does

    def _mlp(self, norm: torch.Tensor, params: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        if "experts" not in params:
            return super()._mlp(norm, params)
        choice = ChosenExperts(_router(params), self._choices, self._renormalises)
        gate_up, down = (params["experts"][name] for name in ("gate_up_proj", "down_proj"))
        if not (_whole(gate_up) and _whole(down)):
            return partial(self._elsewhere, norm, choice, params["experts"])
        return partial(decoder_mlp, layer=MLP(norm, self._eps, Linear(gate_up), None, Linear(down), choice))

    def _elsewhere(
        self, norm: torch.Tensor, choice: ChosenExperts, experts: Mapping[str, Any], x: torch.Tensor
    ) -> torch.Tensor:
        """The second half of a layer whose experts are on several ranks, or in host memory."""
        normed = F.rms_norm(x, x.shape[-1:], norm, self._eps)
        routing = Routing.of(*choice.of(normed), len(choice.router))
        return x + run_experts(experts, normed, routing, _expert).to(x.dtype)

    def layers_of_experts(self, params: Any) -> list[Mapping[str, Any]]:
        return [layer["mlp"] for layer in params["model"]["layers"] if "experts" in layer["mlp"]]

    def choices(self, layer: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return ChosenExperts(_router(layer), self._choices, False).of(x)[0]


def _router(params: Mapping[str, Any]) -> torch.Tensor:
    """The router's weight ``[E, W]``, its rows in the order of those of the experts' leaves: by their seats, if any."""
    weight, seats = params["gate"]["weight"], params.get("router", {}).get("seats")
    return weight if seats is None else weight[seats.argsort()]


def _whole(leaf: Any) -> bool:
    """Whether a leaf has all experts, in this rank's memory."""
    plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedExperts) and not has_torch_function((leaf,))
    return plain or isinstance(leaf, QuantizedMatrix)


def _expert(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    gate, up = product(rows, params["gate_up_proj"]).chunk(2, -1)
    return product(F.silu(gate) * up, params["down_proj"])

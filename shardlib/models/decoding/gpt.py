"""The library's GPT as a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.models import gpt
from shardlib.models.decoding.cache import Attend
from shardlib.models.decoding.decoder import Decoder
from shardlib.models.experts import Experts
from shardlib.nn.moe.layer import route
from shardlib.nn.moe.routers.base import Router


class GPT(Decoder):
    """The model `shardlib.models.gpt`, without dropout, and with room for all tokens in every expert: which ones a capacity
    would drop depends on the tokens that happen to be computed together. Raises `ValueError`: ``config.layout`` is for fewer
    tokens than ``config.sequence``, or a router is not causal."""

    sequence: int
    vocab: int

    products: tuple[str, ...] = ("blocks/*/attn/*/weight", "blocks/*/mlp/*/weight", "head/weight")

    def __init__(self, config: gpt.GPTConfig) -> None:
        layout = config.layout
        if layout is not None and layout.size * layout.block < config.sequence:
            raise ValueError(
                f"GPTConfig: with {layout.size} blocks of {layout.block} the layout is shorter than "
                f"sequence={config.sequence}; make it for that length"
            )
        self._config = replace(config, dropout=0.0, moe=None if config.moe is None else _with_room(config.moe))
        self.sequence, self.vocab = config.sequence, config.vocab
        if config.moe is not None and isinstance(config.moe.config.expert, str):
            self.products += ("blocks/*/moe/*/gate", "blocks/*/moe/*/up", "blocks/*/moe/*/down")

    def hidden(self, params: Any, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        def of_layer(layer: int) -> Callable[..., torch.Tensor]:
            def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
                y = attend(layer, *(x[0].transpose(0, 1) for x in (q, k, v)), **how)
                return y.transpose(0, 1)[None]

            return attention

        return gpt.hidden(self._config, params, tokens[None], attend=of_layer, positions=positions[None])[0]

    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, params["head"]["weight"])

    def layers_of_experts(self, params: Any) -> list[Mapping[str, Any]]:
        return [block["moe"] for block in params["blocks"] if "moe" in block]

    def choices(self, layer: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        assert self._config.moe is not None
        routing, seats = route(layer["router"], x, self._config.moe.config), layer["router"].get("seats")
        return (routing if seats is None else routing.seated(seats)).experts


def _with_room(experts: Experts) -> Experts:
    """The same experts without a capacity."""
    router = experts.config.router
    if not isinstance(router, Router):
        return experts
    if not router.causal:
        raise ValueError(
            f"generate: the router {type(router).__name__} chooses among all tokens of a text, later ones too; use one of "
            "tokens' own choices, such as sl.nn.routers.top_k"
        )
    return replace(experts, config=replace(experts.config, router=replace(router, capacity=None)))

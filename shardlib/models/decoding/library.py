"""The library's GPT as a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.models import gpt
from shardlib.models.decoding.decoder import Attend, Decoder


class GPT(Decoder):
    """The model `shardlib.models.gpt`, without dropout.

    Raises:
        ValueError: ``config.layout`` is for fewer tokens than ``config.sequence``.
    """

    def __init__(self, config: gpt.GPTConfig) -> None:
        layout = config.layout
        if layout is not None and layout.size * layout.block < config.sequence:
            raise ValueError(
                f"GPTConfig: a layout of {layout.size} blocks of {layout.block} is for fewer tokens than "
                f"sequence={config.sequence}; to generate, make it for that length, or lower sequence"
            )
        self._config = replace(config, dropout=0.0)
        self.sequence = config.sequence

    def hidden(self, params: Any, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        def of_layer(layer: int) -> Callable[..., torch.Tensor]:
            def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
                y = attend(layer, *(x[0].transpose(0, 1) for x in (q, k, v)), **how)
                return y.transpose(0, 1)[None]

            return attention

        return gpt.hidden(self._config, params, tokens[None], attend=of_layer, positions=positions[None])[0]

    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, params["head"]["weight"])

"""GPT-2 of transformers as a `Decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.models.decoding.cache import Attend
from shardlib.models.decoding.decoder import Decoder, require_settings

_SETTINGS = {
    "activation_function": ("gelu_new",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class GPT2(Decoder):
    """A ``GPT2LMHeadModel``, also made `shardlib.models.huggingface.sliceable`. Its parameters are by module path. Raises
    `TreeError`: settings that this does not compute."""

    sequence: int
    vocab: int

    def __init__(self, model: Any) -> None:
        config = model.config
        require_settings(config, _SETTINGS)
        self.sequence, self.vocab = config.n_positions, config.vocab_size
        self._size, self._eps = config.n_embd // config.n_head, config.layer_norm_epsilon

    def hidden(self, params: Any, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        params = params["transformer"]
        x = F.embedding(tokens, params["wte"]["weight"]) + F.embedding(positions, params["wpe"]["weight"])
        for index, layer in enumerate(params["h"]):
            q, k, v = self._heads(layer["attn"]["c_attn"], self._norm(layer["ln_1"], x))
            x = x + _product(layer["attn"]["c_proj"], attend(index, q, k, v).flatten(1))
            h = F.gelu(_product(layer["mlp"]["c_fc"], self._norm(layer["ln_2"], x)), approximate="tanh")
            x = x + _product(layer["mlp"]["c_proj"], h)
        return self._norm(params["ln_f"], x)

    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, params["lm_head"]["weight"])

    def _heads(self, params: Mapping[str, Any], x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, ``[T, heads, size]``, of one packed projection, or of three in a sliceable model."""
        if "weight" in params:
            packed = _product(params, x).chunk(3, -1)
        else:
            packed = tuple(_product(params[name], x) for name in ("query", "key", "value"))
        return [part.unflatten(-1, (-1, self._size)) for part in packed]

    def _norm(self, params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"], self._eps)


def _product(params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """``x @ weight + bias``: GPT-2's weights lie (in, out)."""
    return torch.addmm(params["bias"], x, params["weight"])

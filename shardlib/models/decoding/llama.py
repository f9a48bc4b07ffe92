"""Llama of transformers, and the models that differ from it in biases and norms, as a `Decoder`.

To rows of a few tokens torch's own small operations add less time than those with a backward, as those of `shardlib.nn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.errors import TreeError
from shardlib.models.decoding.decoder import Attend, Decoder
from shardlib.models.decoding.products import linear
from shardlib.models.decoding.settings import require_settings
from shardlib.models.decoding.windows import Windows

_SETTINGS = {"hidden_act": ("silu",)}
# Rotary embeddings whose frequencies do not depend on the length of the sequence.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


class Llama(Decoder):
    """A Llama, Mistral, Qwen2 or Qwen3 with an output layer. Its parameters are by module path.

    Args:
        model: of transformers, of which only the configuration and the rotary embedding's type are read.
        windows: which layers have a sliding window.

    Raises:
        TreeError: settings that this does not compute.
    """

    products: tuple[str, ...] = (
        "model/layers/*/self_attn/*_proj/weight",
        "model/layers/*/mlp/*_proj/weight",
        "lm_head/weight",
    )

    def __init__(self, model: Any, windows: Windows) -> None:
        config = model.config
        require_settings(config, _SETTINGS)
        self.sequence, self.vocab = config.max_position_embeddings, config.vocab_size
        self._size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._windows = windows(config)
        self._frequencies, self._scale = _rotary(model.model.rotary_emb, config)

    def hidden(self, params: Any, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        params = params["model"]
        x = F.embedding(tokens, params["embed_tokens"]["weight"])
        theta = positions[:, None].float() * self._frequencies.to(x.device)
        cos, sin = ((table * self._scale).unsqueeze(1).to(x.dtype) for table in (theta.cos(), theta.sin()))
        for index, layer in enumerate(params["layers"]):
            normed = self._norm(layer["input_layernorm"], x)
            x = x + self._attention(layer["self_attn"], index, normed, (cos, sin), attend)
            x = x + self._mlp(layer["mlp"], self._norm(layer["post_attention_layernorm"], x))
        return self._norm(params["norm"], x)

    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        return linear(params["lm_head"], x)

    def _attention(
        self,
        params: Mapping[str, Any],
        index: int,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        q, k, v = (linear(params[f"{name}_proj"], x).unflatten(-1, (-1, self._size)) for name in "qkv")
        if "q_norm" in params:
            q, k = self._norm(params["q_norm"], q), self._norm(params["k_norm"], k)
        q, k = _rotated(torch.cat([q, k], 1), *angles).split([q.shape[1], k.shape[1]], 1)
        return linear(params["o_proj"], attend(index, q, k, v, window=self._windows[index]).flatten(1))

    def _mlp(self, params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return linear(params["down_proj"], F.silu(linear(params["gate_proj"], x)).mul_(linear(params["up_proj"], x)))

    def _norm(self, params: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], params["weight"], self._eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads ``[T, heads, size]``, whose pairs (x_j, x_j+size/2) are rotated by angles of cos and sin ``[T, 1, size / 2]``."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _rotary(module: Any, config: Any) -> tuple[torch.Tensor, float]:
    """The frequencies ``[size / 2]`` of the model's rotary embedding, and the factor of its cos and sin."""
    if module.rope_type not in _FIXED_ROTARY:
        raise TreeError(
            f"generate cannot run rotary embeddings of the type {module.rope_type!r}, whose frequencies change with the "
            f"length; the types {', '.join(_FIXED_ROTARY)} it can"
        )
    with torch.device("cpu"):  # the model may be on the meta device
        fresh = type(module)(config)
    return fresh.inv_freq.float(), fresh.attention_scaling

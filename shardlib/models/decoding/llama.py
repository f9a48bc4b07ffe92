"""Llama of transformers, and the models that differ from it in biases and norms, as a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardlib.errors import TreeError
from shardlib.kernels.decoder_attention import Heads, decoder_attention
from shardlib.kernels.decoder_mlp import MLP, decoder_mlp
from shardlib.kernels.thin_matmul import Linear
from shardlib.models.decoding.cache import Attend
from shardlib.models.decoding.decoder import Decoder, Windows, require_settings

_SETTINGS = {"hidden_act": ("silu",)}
# Rotary embeddings whose frequencies do not depend on the length of the sequence.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


class PreparedLlama(NamedTuple):
    """The parameters of a Llama, prepared.

    Attributes:
        embedding: ``[vocab, width]``.
        layers: their two halves; the second is a function of tokens ``[T, width]``.
        norm: ``[width]``.
        head: the output layer.
    """

    embedding: torch.Tensor
    layers: Sequence[tuple[Heads, Callable[[torch.Tensor], torch.Tensor]]]
    norm: torch.Tensor
    head: Linear


class Llama(Decoder):
    """A Llama, Mistral, Qwen2 or Qwen3 with an output layer. Its parameters are by module path. Raises `TreeError`: settings
    that this does not compute. ``model``: of transformers, of which only the configuration and the rotary embedding's type
    are read. ``windows``: which layers have a sliding window."""

    sequence: int
    vocab: int

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

    def prepared(self, params: Any) -> Any:
        model = params["model"]
        layers = [self._layer(index, layer) for index, layer in enumerate(model["layers"])]
        return PreparedLlama(
            model["embed_tokens"]["weight"], layers, model["norm"]["weight"], linear(params["lm_head"])
        )

    def hidden(
        self, params: PreparedLlama, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x = F.embedding(tokens, params.embedding)
        theta = positions[:, None].float() * self._frequencies.to(x.device)
        cos, sin = ((table * self._scale).to(x.dtype) for table in (theta.cos(), theta.sin()))
        for index, (heads, mlp) in enumerate(params.layers):
            seated = attend.seated(index)
            if seated is None:
                q, k, v = heads.of(x, cos, sin)
                x = heads.after(x, attend(index, q, k, v, window=heads.window))
            else:
                x = decoder_attention(x, heads, cos, sin, *seated)
            x = mlp(x)
        return F.rms_norm(x, x.shape[-1:], params.norm, self._eps)

    def logits(self, params: PreparedLlama, x: torch.Tensor) -> torch.Tensor:
        return params.head(x)

    def _layer(self, index: int, params: Mapping[str, Any]) -> tuple[Heads, Callable[[torch.Tensor], torch.Tensor]]:
        attention = params["self_attn"]
        q, k, v, o = (linear(attention[f"{name}_proj"]) for name in "qkvo")
        heads = Heads(
            params["input_layernorm"]["weight"],
            self._eps,
            q,
            k,
            v,
            o,
            self._size,
            attention["q_norm"]["weight"] if "q_norm" in attention else None,
            attention["k_norm"]["weight"] if "k_norm" in attention else None,
            self._windows[index],
        )
        return heads, self._mlp(params["post_attention_layernorm"]["weight"], params["mlp"])

    def _mlp(self, norm: torch.Tensor, params: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The second half of a layer."""
        gate, up, down = (linear(params[f"{name}_proj"]) for name in ("gate", "up", "down"))
        return partial(decoder_mlp, layer=MLP(norm, self._eps, gate, up, down))


def linear(params: Mapping[str, Any]) -> Linear:
    return Linear(params["weight"], params.get("bias"))


def _rotary(module: Any, config: Any) -> tuple[torch.Tensor, float]:
    """The frequencies ``[size / 2]`` of the model's rotary embedding, and the factor of its cos and sin."""
    if module.rope_type not in _FIXED_ROTARY:
        raise TreeError(
            f"generate cannot run rotary embeddings {module.rope_type!r}; it can {', '.join(_FIXED_ROTARY)}"
        )
    with torch.device("cpu"):  # the model may be on the meta device
        fresh = type(module)(config)
    return fresh.inv_freq.float(), fresh.attention_scaling

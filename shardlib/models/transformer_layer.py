"""One layer of a transformer as a pure function, made of fused kernels, with a choice of what backward recomputes.

Encoder or decoder, pre- or post-norm (arXiv 1706.03762; pre-norm 2002.04745). Each kernel saves the inputs of its backward.
Matrix products save their inputs too, which can be recomputed from those, without another matrix product. In numbers per
token, with width w, inner width f and h heads over s keys, the choices are:

- "norm": 2w, the outputs of the norms (post-norm: w, the output of the first; that of the second belongs to the next layer);
- "gelu": f, the output of GeLU;
- "dropout": h·s, attention after dropout, if there is dropout.

Masks of dropout are never saved: backward draws them again from the counter (`shardlib.rng`).

``stochastic`` halves the remaining fp32 memory: activations are saved in bf16, rounded stochastically (see
`shardlib.kernels.common.saved`). The outputs do not change. Gradients do: they are computed from activations with relative
errors of up to 1/128. They are unbiased as far as they are linear in the saved activations (exactly for those of weights, to
second order for those through a norm, a GeLU or a softmax), and no longer the same on every mesh.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.common.environment import environment
from shardlib.kernels.common.saved import kept_in_bf16, recomputed
from shardlib.kernels.gelu import gelu
from shardlib.kernels.norm import layer_norm
from shardlib.kernels.softmax import softmax
from shardlib.models.layers import Initial, Params, layer_rules
from shardlib.nn.attention import attention
from shardlib.nn.dropout import dropout
from shardlib.nn.functional import local_slice, slice_of
from shardlib.rng import Key
from shardlib.tree import leaves_of

RECOMPUTE = ("norm", "gelu", "dropout")


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and choices of a layer.

    Attributes:
        inner: the width of the MLP; 4 · width by default.
        norm: "pre": the inputs of attention and of the MLP are normalised; "post": the sums of their outputs and residuals.
        causal: whether a position sees only itself and earlier ones.
        approximate: of GeLU: "none" or "tanh".
        dropout: the probability, for the outputs of attention and of the MLP.
        attention_dropout: the probability, for attention weights, which are then all in memory.
        recompute: the names in `RECOMPUTE` that backward recomputes; see the module's docstring. Results do not change.
        stochastic: saves activations for backward in bf16; see the module's docstring for the effect on gradients.

    Raises:
        ValueError: ``heads`` does not divide ``width``, a probability lies outside [0, 1), a name is unknown, or
            ``stochastic`` is given with another dtype than fp32.
    """

    width: int
    heads: int
    inner: int = 0
    norm: str = "pre"
    causal: bool = False
    approximate: str = "none"
    eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    recompute: tuple[str, ...] = ()
    stochastic: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"LayerConfig: heads={self.heads} does not divide width={self.width}; choose a multiple")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"LayerConfig: norm={self.norm!r} is neither 'pre' nor 'post'")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"LayerConfig: {name}={getattr(self, name)}, but it must lie in [0, 1)")
        if unknown := set(self.recompute) - set(RECOMPUTE):
            raise ValueError(f"LayerConfig: recompute names {sorted(unknown)}; it can name {RECOMPUTE}")
        if self.stochastic and self.dtype != torch.float32:
            raise ValueError(f"LayerConfig: stochastic is for fp32, and dtype is {self.dtype}; leave it out")


def init(config: LayerConfig, seed: int = 0) -> Params:
    """Initial parameters: weights from N(0, 0.02²), biases 0, gains 1.

    Returns ``{"ln1", "attn": {"qkv", "out"}, "ln2", "mlp": {"up", "down"}}``, each a ``{"weight", "bias"}``, as a block of
    `shardlib.models.gpt`. Weights are (out, in); the rows of qkv are (heads, 3, size).
    """
    initial, width, inner = Initial(config.dtype, "cpu", seed), config.width, config.inner or 4 * config.width
    return {
        "ln1": initial.norm(width),
        "attn": {"qkv": initial.linear(3 * width, width), "out": initial.linear(width, width)},
        "ln2": initial.norm(width),
        "mlp": {"up": initial.linear(inner, width), "down": initial.linear(width, inner)},
    }


def slicing_rules(config: LayerConfig, prefix: str = "*") -> Params:
    """Rules for `shardlib.tensor_slicing`: attention by heads, the MLP by its inner width.

    Args:
        prefix: a glob with which the paths of the layers' parameters begin.
    """
    return layer_rules(prefix, config.heads)


def transformer_layer(
    config: LayerConfig, params: Params, x: Tensor, rng: Key | None = None, lengths: Tensor | None = None
) -> Tensor:
    """The layer's output for ``x``, both (batch, sequence, width).

    Args:
        params: as `init` returns them.
        rng: the key of dropout.
        lengths: (batch,), int64: the number of positions of each sequence; further positions are padding, which no other
            position sees. All scores are then in memory.

    Raises:
        ValueError: there is dropout without ``rng``, or ``lengths`` or attention dropout with `shardlib.sequence`.
    """
    if (config.dropout or config.attention_dropout) and rng is None:
        raise ValueError("LayerConfig has dropout, but no rng was given to draw it from")
    with kept_in_bf16(map(local_slice, leaves_of(params))) if config.stochastic else contextlib.nullcontext():
        return _layer(config, params, x, rng, lengths)


def _layer(config: LayerConfig, params: Params, x: Tensor, rng: Key | None, lengths: Tensor | None) -> Tensor:
    pre = config.norm == "pre"
    normed, keep = _norm(config, params["ln1"], x) if pre else (x, contextlib.nullcontext())
    with keep:
        qkv = F.linear(normed, params["attn"]["qkv"]["weight"], params["attn"]["qkv"]["bias"])
    x = _add(config, params["attn"]["out"], _attention(config, params, qkv, rng, lengths), x, rng, "attn")
    normed, keep = _norm(config, params["ln2" if pre else "ln1"], x)
    x = _mlp(config, params["mlp"], normed, keep, x if pre else normed, rng)
    return x if pre else layer_norm(x, params["ln2"]["weight"], params["ln2"]["bias"], eps=config.eps)


Keep = contextlib.AbstractContextManager[None]


def _norm(config: LayerConfig, params: Params, x: Tensor) -> tuple[Tensor, Keep]:
    """The norm of ``x``, and a context in which a product saves a note of it, if it is to be recomputed."""
    weight, bias = params["weight"], params["bias"]
    normed = layer_norm(x, weight, bias, eps=config.eps)
    return normed, _recomputed(config, "norm", normed, lambda *v: layer_norm(*v, eps=config.eps), x, weight, bias)


def _mlp(config: LayerConfig, params: Params, x: Tensor, keep: Keep, residual: Tensor, rng: Key | None) -> Tensor:
    with keep:
        z = F.linear(x, params["up"]["weight"])
    bias = local_slice(params["up"]["bias"])
    h = gelu(z, bias, approximate=config.approximate)
    with _recomputed(config, "gelu", h, lambda *v: gelu(*v, approximate=config.approximate), z, bias):
        return _add(config, params["down"], h, residual, rng, "mlp")


def _add(config: LayerConfig, params: Params, x: Tensor, residual: Tensor, rng: Key | None, name: str) -> Tensor:
    """residual + dropout(linear(x))"""
    if rng is None or config.dropout == 0:
        return residual + F.linear(x, params["weight"], params["bias"])
    out = F.linear(x, params["weight"])
    return dropout(out, config.dropout, rng.fold_in(name), bias=params["bias"], residual=residual)


def _attention(config: LayerConfig, params: Params, qkv: Tensor, rng: Key | None, lengths: Tensor | None) -> Tensor:
    """Attention of the heads in ``qkv``, which may be a slice of them."""
    q, k, v = qkv.unflatten(-1, (-1, 3, config.width // config.heads)).permute(3, 0, 2, 1, 4)
    if lengths is None and config.attention_dropout == 0:
        return attention(q, k, v, causal=config.causal).transpose(1, 2).flatten(2)
    if environment().parts is not None:
        raise ValueError("lengths and attention dropout need whole sequences; leave shardlib.sequence out")
    scale = 1 / math.sqrt(q.shape[-1])
    seen = softmax(q @ k.transpose(-1, -2), lengths=lengths, causal=config.causal, scale=scale)
    if rng is None or config.attention_dropout == 0:
        return (seen @ v).transpose(1, 2).flatten(2)
    first, whole = slice_of(params["attn"]["qkv"]["weight"])
    heads = first * config.heads // whole, config.heads
    drop = partial(dropout, p=config.attention_dropout, key=rng.fold_in("attention"), heads=heads)
    left = drop(seen)
    with _recomputed(config, "dropout", left, drop, seen):
        return (left @ v).transpose(1, 2).flatten(2)


def _recomputed(config: LayerConfig, name: str, value: Tensor, function: Any, *inputs: Any) -> Keep:
    return recomputed(value, function, *inputs) if name in config.recompute else contextlib.nullcontext()

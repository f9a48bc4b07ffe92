"""Initial parameters, and layers as pure functions of parameters, for the models of this room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.nn.dropout import dropout
from shardlib.rng import Key
from shardlib.sparse.layout import check_layout
from shardlib.transforms.tensor_slicing import column, row

Params = dict[str, Any]


class Initial:
    """Initial parameters of one model. Values depend on ``seed`` and the order of the calls, not on ``device``."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 0.02) -> Tensor:
        """A tensor drawn from N(0, std²); on the meta device without values."""
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape).normal_(std=std, generator=self._generator).to(self._device, self._dtype)

    def linear(self, out: int, into: int, std: float = 0.02) -> Params:
        """``{"weight": (out, in), "bias": (out,)}``, the bias 0."""
        bias = torch.zeros(out, dtype=self._dtype, device=self._device)
        return {"weight": self.normal(out, into, std=std), "bias": bias}

    def norm(self, width: int) -> Params:
        """``{"weight": ones, "bias": zeros}``."""
        one = torch.ones(width, dtype=self._dtype, device=self._device)
        return {"weight": one, "bias": torch.zeros_like(one)}


def linear(params: Params, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def layer_norm(params: Params, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"], eps)


def self_attention(params: Params, x: Tensor, size: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Self-attention with parameters ``{"qkv", "out"}``: (B, S, W) -> (B, S, W).

    The rows of qkv are (heads, 3, size), so that a slice has whole heads, as many as its shape says. ``attend`` takes q, k
    and v, (B, heads, S, size)."""
    q, k, v = linear(params["qkv"], x).unflatten(-1, (-1, 3, size)).permute(3, 0, 2, 1, 4)
    return linear(params["out"], attend(q, k, v).transpose(1, 2).flatten(2))


def layer_rules(prefix: str, heads: int) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing` of layers ``{"attn": {"qkv", "out"}, "mlp": {"up", "down"}}``.

    Attention is sliced by heads, the MLP by its inner width. The layers' paths begin with the glob ``prefix``."""
    return {
        f"{prefix}attn/qkv": column(heads=heads),
        f"{prefix}attn/out": row(heads=heads),
        f"{prefix}mlp/up": "column",
        f"{prefix}mlp/down": "row",
    }


def drop(p: float, x: Tensor, rng: Key | None, name: str) -> Tensor:
    """Dropout of ``x`` by the key ``rng`` folded with ``name``, which it needs unless ``p`` is 0."""
    if p == 0:
        return x
    if rng is None:
        raise ValueError(f"the model has dropout={p}, but no rng was given to draw it from")
    return dropout(x, p, rng.fold_in(name))


def check_sizes(config: Any, *names: str) -> None:
    """Checks the sizes ``names`` of a model's configuration, and the options that all models share. Raises `ValueError`: a
    size is below 1, ``heads`` does not divide ``width``, ``dropout`` is not in [0, 1), or the layout has another number of
    heads."""
    kind = type(config).__name__
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{kind}: {name}={getattr(config, name)}, but it must be at least 1")
    if config.width % config.heads:
        raise ValueError(f"{kind}: heads={config.heads} does not divide width={config.width}; choose a multiple")
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"{kind}: dropout={config.dropout}, but it must lie in [0, 1)")
    if config.layout is not None and check_layout(config.layout).heads not in (1, config.heads):
        raise ValueError(f"{kind}: the layout has {config.layout.heads} heads; make it for 1 or for {config.heads}")

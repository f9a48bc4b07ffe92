"""What the models here are made of: fresh parameters, and layers as pure functions of them."""

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


class Fresh:
    """Fresh parameters of one model. Values depend on ``seed`` and the order they are asked for, not on ``device``."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 0.02) -> Tensor:
        """From N(0, std²); on the meta device without values."""
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
    """``{"qkv", "out"}``: (B, S, W) -> (B, S, W). The rows of qkv are (heads, 3, size).

    So a slice of them holds whole heads, as many as its shape tells. ``attend`` takes q, k and v, (B, heads, S, size).
    """
    q, k, v = linear(params["qkv"], x).unflatten(-1, (-1, 3, size)).permute(3, 0, 2, 1, 4)
    return linear(params["out"], attend(q, k, v).transpose(1, 2).flatten(2))


def layer_rules(prefix: str, heads: int) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing` of layers ``{"attn": {"qkv", "out"}, "mlp": {"up", "down"}}`` at paths that
    begin with the glob ``prefix``: attention by heads, the MLP by its inner width.
    """
    return {
        f"{prefix}attn/qkv": column(heads=heads),
        f"{prefix}attn/out": row(heads=heads),
        f"{prefix}mlp/up": "column",
        f"{prefix}mlp/down": "row",
    }


def drop(p: float, x: Tensor, rng: Key | None, name: str) -> Tensor:
    """Dropout by the key of that name; ``x`` itself where ``p`` is 0."""
    if p == 0:
        return x
    if rng is None:
        raise ValueError(f"the model has dropout={p}, but no rng was given to draw it from")
    return dropout(x, p, rng.fold_in(name))


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError when a size is below 1, ``heads`` does not divide ``width``, ``dropout`` is not in [0, 1) or the
    layout has other heads.
    """
    told = type(config).__name__
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{told}: {name}={getattr(config, name)}, but it must be at least 1")
    if config.width % config.heads:
        raise ValueError(
            f"{told}: heads={config.heads} does not divide width={config.width}; "
            "choose a width that is a multiple of heads"
        )
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"{told}: dropout={config.dropout}, but it must lie in [0, 1)")
    if config.layout is not None and check_layout(config.layout).heads not in (1, config.heads):
        raise ValueError(
            f"{told}: the layout has {config.layout.heads} heads and the model heads={config.heads}: make it for 1 head, "
            "which stands for all, or for as many"
        )

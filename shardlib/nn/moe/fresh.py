"""`init_moe`: initial parameters of a layer of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardlib import init
from shardlib.nn.moe.config import MoEConfig
from shardlib.rng import Key, require_key


def init_moe(
    key: Key,
    config: MoEConfig,
    *,
    experts: int,
    width: int,
    hidden: int,
    shared: int = 0,
    residual: int = 0,
    balance: bool = False,
    seats: bool = False,
    replicas: bool = False,
    std: float = 0.02,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Initial parameters for `moe`: matrices from N(0, std²), biases 0.

    Numbers are drawn by counters (`shardlib.init`): in a function that is passed to `shardlib.shard` each rank draws only its
    shards, and only its experts.

    Args:
        config: of an expert that has a name.
        experts: their number, E.
        width: of tokens, W.
        hidden: an expert's inner width, H.
        shared: the inner width of an expert that sees every token; 0 for none.
        residual: the inner width of PR-MoE's residual expert, whose share is one half at first; 0 for none.
        balance: whether the router has a bias for balance without a loss (`shardlib.nn.routers.balanced`), in fp32. No
            gradient reaches it; freeze it, so that weight decay does not shrink it: ``sl.freeze("*router/balance")``.
        seats: whether experts have seats, which `shardlib.relayout` changes to balance the ranks' loads.
        replicas: whether hot experts may have second copies (``sl.experts(spare=)``), which it changes too.
        out_std: for "down", which writes to the residual stream; by default ``std``.

    Raises:
        ValueError: sizes below 1, or a config with a function for an expert.
        TypeError: a ``key`` that is no key.

    >>> config = sl.nn.MoEConfig(sl.nn.routers.switch())
    >>> params = sl.nn.init_moe(sl.Key(0), config, experts=4, width=8, hidden=32)
    >>> {name: tuple(leaf.shape) for name, leaf in params["experts"].items()}
    {'gate': (4, 32, 8), 'up': (4, 32, 8), 'down': (4, 8, 32)}
    """
    require_key("init_moe", "key", key)
    if min(experts, width, hidden) < 1 or min(shared, residual) < 0:
        raise ValueError(
            f"init_moe(experts={experts}, width={width}, hidden={hidden}, shared={shared}, residual={residual}): sizes are "
            "at least 1, and of shared and residual experts 0 or more"
        )
    kind: dict[str, Any] = {"dtype": dtype, "device": device}

    def zeros(*shape: int, **other: Any) -> torch.Tensor:
        return torch.zeros(shape, **kind | other)

    def normal(name: str, *shape: int, std: float = std) -> torch.Tensor:
        return init.normal(key.fold_in(name), shape, std, **kind)

    def expert(name: str, inner: int, *number: int) -> dict[str, torch.Tensor]:
        stds: Mapping[str, float] = {"down": std if out_std is None else out_std}
        return {
            leaf: normal(f"{name}/{leaf}", *number, *shape, std=stds.get(leaf, std))
            if len(shape) > 1
            else zeros(*number, *shape)
            for leaf, shape in config.shapes(width, inner).items()
        }

    params: dict[str, Any] = {
        "router": {"weight": normal("router/weight", experts, width)},
        "experts": expert("experts", hidden, experts),
    }
    if balance:
        params["router"]["balance"] = zeros(experts, dtype=torch.float32)
    if seats:
        params["router"]["seats"] = torch.arange(experts, device=device)
    if replicas:
        params["router"]["replicas"] = torch.full((experts,), -1, device=device)
    if shared:
        params["shared"] = expert("shared", shared)
    if residual:
        params["residual"] = expert("residual", residual) | {"mix": {"weight": zeros(2, width), "bias": zeros(2)}}
    return params

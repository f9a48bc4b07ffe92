"""Sparse upcycling: a dense model's MLPs become layers of experts, each a copy (arXiv 2212.05055)."""

from __future__ import annotations

import torch

from shardlib import init
from shardlib.models.experts import Experts
from shardlib.models.layers import Params
from shardlib.rng import Key, require_key
from shardlib.sharded.given import whole_params


def upcycle(params: Params, experts: Experts, key: Key, *, noise: float = 0.0, std: float = 0.02) -> Params:
    """The parameters of a dense `shardlib.models.gpt` with experts in place of the MLPs of some layers.

    Each expert is a copy of the layer's MLP, and routers are drawn from N(0, std²). So the model computes what the dense one
    did wherever a token's weights sum to 1 and nothing is dropped: with a router that has ``renormalise="chosen"`` and no
    capacity, and without ``noise``. Shared experts begin with an output of 0; residual ones as a copy. The other parameters
    are the dense model's own tensors.

    Args:
        params: as `shardlib.models.gpt.init` makes them.
        experts: for the new configuration, ``dataclasses.replace(config, moe=experts)``. Its expert is "gelu_tanh", and of
            the MLP's inner width, as a copy is.
        noise: what is added to matrices of all copies but the first, as a multiple of a matrix's own standard deviation.

    Raises:
        ValueError: experts of another kind or width, a model that has experts already, or a pattern that does not fit.
        TreeError: sharded parameters, or a module in their place.
        TypeError: a ``key`` that is no key.

    >>> from shardlib.models import gpt
    >>> router = sl.nn.routers.top_k(2, renormalise="chosen")
    >>> experts = gpt.Experts((0, 4), sl.nn.MoEConfig(router, "gelu_tanh"))
    >>> dense = gpt.init(gpt.GPTConfig(layers=2, width=16, heads=2))
    >>> params = sl.models.upcycle(dense, experts, sl.Key(0))
    >>> params["blocks"][1]["moe"]["experts"]["up"].shape
    torch.Size([4, 64, 16])
    """
    require_key("upcycle", "key", key)
    params = whole_params("upcycle", params)
    blocks = params["blocks"]
    if len(blocks) % len(experts.per_layer):
        raise ValueError(
            f"upcycle: {experts.per_layer} does not divide the model's {len(blocks)} layers; give a number for each"
        )
    return params | {
        "blocks": [
            _with_experts(block, experts, layer, key.fold_in(layer), noise, std) if experts.of_layer(layer) else block
            for layer, block in enumerate(blocks)
        ]
    }


def _with_experts(block: Params, experts: Experts, layer: int, key: Key, noise: float, std: float) -> Params:
    if "mlp" not in block:
        raise ValueError(
            f"upcycle: layer {layer} has no MLP, but {', '.join(block)}; give the dense model's parameters"
        )
    mlp = {
        f"{name}{suffix}": block["mlp"][name][leaf]
        for name in ("up", "down")
        for leaf, suffix in (("weight", ""), ("bias", "_bias"))
    }
    hidden, width = mlp["up"].shape
    fresh = experts.init(key, layer, width, hidden, std=std, dtype=mlp["up"].dtype, device=mlp["up"].device)
    found = {name: tuple(leaf.shape[1:]) for name, leaf in fresh["experts"].items()}
    if experts.config.expert != "gelu_tanh" or found != {name: tuple(leaf.shape) for name, leaf in mlp.items()}:
        raise ValueError(
            f"upcycle: the experts are {experts.config.expert!r} with {found}, and copies of layer {layer}'s MLP are "
            f"'gelu_tanh' of the inner width {hidden}: leave out hidden="
        )
    number = experts.of_layer(layer)
    copied = {name: copies(leaf, number, key.fold_in(f"noise/{name}"), noise) for name, leaf in mlp.items()}
    layer_params = fresh | {"experts": copied}
    if "shared" in fresh:
        layer_params["shared"] = fresh["shared"] | {"down": torch.zeros_like(fresh["shared"]["down"])}
    if "residual" in fresh:
        if experts.residual != hidden:
            raise ValueError(f"upcycle: the residual expert is a copy of the MLP; give it residual={hidden}")
        layer_params["residual"] = fresh["residual"] | {name: leaf.clone() for name, leaf in mlp.items()}
    return {name: value for name, value in block.items() if name != "mlp"} | {"moe": layer_params}


def copies(leaf: torch.Tensor, number: int, key: Key, noise: float) -> torch.Tensor:
    """A number of copies of ``leaf``, stacked; all matrices but the first with ``noise`` times their standard deviation."""
    stacked = leaf.expand(number, *leaf.shape).clone()
    if noise and leaf.dim() > 1:
        drawn = init.normal(key, tuple(stacked[1:].shape), dtype=leaf.dtype, device=leaf.device)
        stacked[1:] += drawn * (noise * leaf.std())
    return stacked

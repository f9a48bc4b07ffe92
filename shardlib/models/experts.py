"""Layers of experts in the library's models: which layers have experts, what these say beside their outputs, and dense models
made sparse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib import init
from shardlib.models.layers import Params
from shardlib.nn.functional import Mean
from shardlib.nn.moe.layer import MoEConfig, init_moe, moe
from shardlib.nn.moe.routers import balanced
from shardlib.nn.moe.routing import Routing
from shardlib.nn.sequence import shard_sequence, sum_sequence
from shardlib.rng import Key, require_key
from shardlib.sharded.given import whole_params
from shardlib.sharded.shard import shard_like
from shardlib.sharded.tree import Sharded
from shardlib.transforms.tensor_slicing import column, row
from shardlib.tree import Tree, flatten, unflatten


@dataclass(frozen=True)
class Experts:
    """Experts in place of the MLPs of a model.

    Attributes:
        per_layer: the numbers of experts of the layers in turn, 0 for an MLP. ``(0, 8)`` is every other layer, ``(8,)`` every
            one, and ``(0, 4, 0, 4, 0, 8)`` the pyramid of PR-MoE (arXiv 2201.05596, section 4.1) for six layers.
        config: what the layers compute; see `shardlib.nn.MoEConfig`.
        hidden: the inner width of an expert; by default the MLP's.
        shared: the inner width of an expert that sees every token; 0 for none.
        residual: the inner width of PR-MoE's residual expert; 0 for none.
        load, z: what the sums of the layers' auxiliary losses are multiplied by, to be added to the loss. They are of the
            tokens that a rank has at once, and averaged over ranks and micro-batches as the loss is.
        balance: whether routers have a bias for balance without a loss; see `shardlib.nn.init_moe`.
        seats: whether experts have seats, which `shardlib.relayout` changes to balance the ranks' loads.
        replicas: whether hot experts may have second copies (``sl.experts(spare=)``), which it changes too.

    Raises:
        ValueError: no layer, a negative number of experts, or no experts at all.

    >>> from shardlib.models import gpt
    >>> experts = gpt.Experts((0, 8), sl.nn.MoEConfig(sl.nn.routers.switch(), "gelu_tanh"))
    >>> gpt.GPTConfig(layers=4, moe=experts).moe.of_layer(3)
    8
    """

    per_layer: tuple[int, ...]
    config: MoEConfig
    hidden: int | None = None
    shared: int = 0
    residual: int = 0
    load: float = 0.01
    z: float = 0.0
    balance: bool = False
    seats: bool = False
    replicas: bool = False

    def __post_init__(self) -> None:
        if not self.per_layer or min(self.per_layer) < 0 or not any(self.per_layer):
            raise ValueError(
                f"Experts(per_layer={self.per_layer}): give the layers' numbers in turn, 0 for an MLP: (0, 8)"
            )

    def of_layer(self, layer: int) -> int:
        """The number of experts of a layer."""
        return self.per_layer[layer % len(self.per_layer)]

    def init(self, key: Key, layer: int, width: int, hidden: int, **how: Any) -> Params:
        """Initial parameters of a layer for a stream of this width, whose MLP would have the inner width ``hidden``."""
        return init_moe(
            key,
            self.config,
            experts=self.of_layer(layer),
            width=width,
            hidden=self.hidden or hidden,
            shared=self.shared,
            residual=self.residual,
            balance=self.balance,
            seats=self.seats,
            replicas=self.replicas,
            **how,
        )

    def slicing_rules(self, prefix: str) -> dict[str, Any]:
        """Rules for `shardlib.tensor_slicing` of layers whose paths begin with the glob ``prefix``: every expert is cut."""
        styles, cut = self.config.slices, {"column": column(experts=True), "row": row(experts=True)}
        alone = [name for name, width in (("shared", self.shared), ("residual", self.residual)) if width]
        rules: dict[str, Any] = {f"{prefix}experts/{name}": cut[style] for name, style in styles.items()}
        return rules | {f"{prefix}{one}/{name}": style for one in alone for name, style in styles.items()}

    def __call__(
        self, params: Params, x: Tensor, rng: Key | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Routed]:
        """The output for (B, S, W), and what the layer says beside it. Segments (B, S) of -1 are padding."""
        mask = None if segments is None else shard_sequence(segments) >= 0
        key = None if rng is None else rng.fold_in("moe")
        y, routing = moe(params, x, self.config, key, mask=mask)
        return y, Routed.of(routing, math.prod(x.shape[:-1]) if mask is None else mask.sum())


class Routed(NamedTuple):
    """What a layer of experts says beside its outputs, under a sequence plan of the whole sequence: a part of the carry.

    Attributes:
        load, z, entropy, dropped: `shardlib.nn.routers.Routing.aux`.
        counts: ``[E]``, float64: assignments per expert, before drops.
    """

    load: Tensor
    z: Tensor
    entropy: Tensor
    dropped: Tensor
    counts: Tensor

    @classmethod
    def of(cls, routing: Routing, tokens: int | Tensor) -> Routed:
        """Of a routing of a number of tokens. Sequence parts count by their tokens."""
        aux = routing.aux
        weight = tokens.to(aux["load"]) if isinstance(tokens, Tensor) else torch.full_like(aux["load"], tokens)
        total = sum_sequence(weight).clamp(min=1)
        means = {name: sum_sequence(aux[name].to(weight.dtype) * weight) / total for name in cls._fields[:-1]}
        return cls(**means, counts=sum_sequence(routing.counts.double()))


def with_losses(experts: Experts, loss: Any, layers: Sequence[Routed | None]) -> tuple[Any, dict[str, Any]]:
    """``loss`` (a scalar or a `Mean`) plus the auxiliary losses of ``layers``, and metrics of the layers with experts.

    Metrics are ``{"experts": {layer: {"load", "z", "entropy", "dropped", "shares"}}}``, each a `Mean`; "shares" is a list,
    the share of the assignments that each expert got.
    """
    routed = {str(layer): values for layer, values in enumerate(layers) if values is not None}
    extra = sum(experts.load * values.load + experts.z * values.z for values in routed.values())
    loss = Mean(loss.total + extra * loss.weight, loss.weight) if isinstance(loss, Mean) else loss + extra
    return loss, {"experts": {layer: _metrics(values) for layer, values in routed.items()}}


def _metrics(routed: Routed) -> dict[str, Any]:
    *aux, counts = (value.detach() for value in routed)
    one, total = torch.ones_like(counts[0]), counts.sum()
    metrics: dict[str, Any] = {name: Mean(value, one) for name, value in zip(Routed._fields, aux)}
    return metrics | {"shares": [Mean(count, total) for count in counts.unbind()]}


def moved(params: Tree, shifts: Mapping[str, Tensor]) -> Tree:
    """``params``, a pytree or `Sharded`, with some leaves moved by whole tensors: path -> what is added."""
    sharded = isinstance(params, Sharded)
    paths, leaves, _ = flatten(params.tree if sharded else params)

    def after(path: str, leaf: Tensor) -> Tensor:
        if path not in shifts:
            return leaf
        shift = shifts[path].to(leaf)
        return leaf + (shard_like(params, path, shift) if sharded else shift)

    return unflatten(flatten(params)[2], [after(path, leaf) for path, leaf in zip(paths, leaves, strict=True)])


def shift_of(shares: Sequence[Tensor], rate: float) -> Tensor:
    """What `shardlib.nn.routers.balanced` adds to a bias, for the shares of a layer's metrics; 0 if no token was routed."""
    loads = torch.stack([torch.as_tensor(share) for share in shares]).double().nan_to_num()
    return balanced(torch.zeros_like(loads), loads, rate)


def upcycle(params: Params, experts: Experts, key: Key, *, noise: float = 0.0, std: float = 0.02) -> Params:
    """The parameters of a dense `shardlib.models.gpt` with experts in place of the MLPs of some layers.

    Each expert is a copy of the layer's MLP (sparse upcycling, arXiv 2212.05055), and routers are drawn from N(0, std²). So
    the model computes what the dense one did wherever a token's weights sum to 1 and nothing is dropped: with a router that
    has ``renormalise="chosen"`` and no capacity, and without ``noise``. Shared experts begin with an output of 0; residual
    ones as a copy. The other parameters are the dense model's own tensors.

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
        raise ValueError(f"upcycle: {experts.per_layer} does not divide {len(blocks)} layers; give a number for each")
    return params | {
        "blocks": [
            _with_experts(block, experts, layer, key.fold_in(layer), noise, std) if experts.of_layer(layer) else block
            for layer, block in enumerate(blocks)
        ]
    }


def _with_experts(block: Params, experts: Experts, layer: int, key: Key, noise: float, std: float) -> Params:
    if "mlp" not in block:
        raise ValueError(f"upcycle: layer {layer} has no MLP, but {', '.join(block)}; give a dense model")
    mlp = {
        f"{name}{suffix}": block["mlp"][name][leaf]
        for name in ("up", "down")
        for leaf, suffix in (("weight", ""), ("bias", "_bias"))
    }
    hidden, width = mlp["up"].shape
    made = experts.init(key, layer, width, hidden, std=std, dtype=mlp["up"].dtype, device=mlp["up"].device)
    found = {name: tuple(leaf.shape[1:]) for name, leaf in made["experts"].items()}
    if experts.config.expert != "gelu_tanh" or found != {name: tuple(leaf.shape) for name, leaf in mlp.items()}:
        raise ValueError(
            f"upcycle: the experts are {experts.config.expert!r} with {found}, and layer {layer}'s MLP is 'gelu_tanh' of the "
            f"inner width {hidden}: leave out hidden="
        )
    number = experts.of_layer(layer)
    copied = {name: copies(leaf, number, key.fold_in(f"noise/{name}"), noise) for name, leaf in mlp.items()}
    layer_params = made | {"experts": copied}
    if "shared" in made:
        layer_params["shared"] = made["shared"] | {"down": torch.zeros_like(made["shared"]["down"])}
    if "residual" in made:
        if experts.residual != hidden:
            raise ValueError(f"upcycle: the residual expert is a copy of the MLP; give it residual={hidden}")
        layer_params["residual"] = made["residual"] | {name: leaf.clone() for name, leaf in mlp.items()}
    return {name: value for name, value in block.items() if name != "mlp"} | {"moe": layer_params}


def copies(leaf: torch.Tensor, number: int, key: Key, noise: float) -> torch.Tensor:
    """A number of copies of ``leaf``, stacked; all matrices but the first with ``noise`` times their standard deviation."""
    stacked = leaf.expand(number, *leaf.shape).clone()
    if noise and leaf.dim() > 1:
        drawn = init.normal(key, tuple(stacked[1:].shape), dtype=leaf.dtype, device=leaf.device)
        stacked[1:] += drawn * (noise * leaf.std())
    return stacked

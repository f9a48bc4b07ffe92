"""Layers of experts in the library's models: which layers have experts, and what these say beside their outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.models.layers import Params
from shardlib.nn.functional import Mean
from shardlib.nn.moe.config import MoEConfig
from shardlib.nn.moe.fresh import init_moe
from shardlib.nn.moe.layer import moe
from shardlib.nn.moe.losses import balanced
from shardlib.nn.moe.routing import Routing
from shardlib.nn.sequence import shard_sequence, sum_sequence
from shardlib.rng import Key
from shardlib.sharded.shard import shard_like
from shardlib.sharded.tree import Sharded
from shardlib.transforms.tensor_slicing import column, row
from shardlib.tree import Tree, flatten, leaves_of, unflatten


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
                f"Experts(per_layer={self.per_layer}): name the numbers of experts of the layers in turn, 0 for an MLP, such "
                "as (0, 8) for every other layer"
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

    def count(self, layer: int, width: int, hidden: int) -> int:
        """The number of elements of `init` of the same arguments."""
        return sum(leaf.numel() for leaf in leaves_of(self.init(Key(0), layer, width, hidden, device="meta")))

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

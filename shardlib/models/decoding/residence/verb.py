"""`experts_on_host`: a model's parameters with its experts in host memory, to generate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from shardlib.common.devices import default_device, with_index
from shardlib.errors import IllegalComposition, TreeError
from shardlib.mesh.transfers import Transfers
from shardlib.models.decoding.kinds import decoder_of
from shardlib.models.decoding.residence.store import ExpertCache, LayerStore, NextLayer, Tally
from shardlib.nn.moe.compute import StoredExperts
from shardlib.sharded.given import given_params
from shardlib.sharded.local import Local
from shardlib.sharded.tree import Sharded
from shardlib.tree import leaves_of, tree_map


class ExpertsOnHost:
    """What `experts_on_host` keeps on the device, and what it has counted.

    Attributes:
        bytes: of the room for experts on the device.
    """

    def __init__(self, stores: Sequence[LayerStore]) -> None:
        self._stores = stores
        self.bytes = sum(store.bytes for store in stores)

    @property
    def tally(self) -> Tally:
        """What was counted since the beginning, in all layers."""
        return sum((store.tally for store in self._stores), Tally())

    def __repr__(self) -> str:
        return f"ExpertsOnHost({self.bytes:,} bytes on the device, {self.tally})"


def experts_on_host(
    model: Any, params: Any, slots: int, *, ahead: bool = True, device: torch.device | None = None
) -> tuple[Any, ExpertsOnHost]:
    """Parameters whose experts are in host memory, for `shardlib.generate` on a device that has no room for all of them.

    All other parameters are on the device, and room for ``slots`` experts of each layer. A layer's experts with tokens come
    up from pinned memory if they are not there, each once, and the least recently used ones make room. Those that are there
    compute while others come; beside them come the experts that the next layer may need, by its router's choices for this
    layer's inputs (arXiv 2312.17238). A wrong guess costs time, never a number: tokens are those with all experts on the
    device. On a mesh without an accelerator the host's memory is the device's, and the copies only cost.

    Args:
        model: as `shardlib.generate` takes it, with layers of experts.
        params: a plain tree, also of `quantized`; or `Sharded`, or a `TrainState`, whose ranks hold what they compute with
            (ZeRO stages 0 to 2), best in host memory, ``sl.offload(params="host")``. They are used where they are: do not
            train them meanwhile. Under `shardlib.experts` each rank brings up its own experts, and guesses by its own tokens.
        slots: at least 1; with 2 an expert comes while another computes.
        ahead: whether experts are fetched ahead of their layer.
        device: of a plain tree; by default that of its leaves, and for leaves on the CPU the process's accelerator.

    Returns:
        parameters for `shardlib.generate`, and what counts hits and bytes.

    Raises:
        TreeError: a model without layers of experts, or one whose experts are in host memory so already; gradients or a
            module in the place of parameters.
        IllegalComposition: a plan that gathers parameters, or slices each expert.
        ValueError: fewer than one slot.

    >>> experts = sl.models.gpt.Experts((4,), sl.nn.MoEConfig(sl.nn.routers.top_k(1)))
    >>> config = sl.models.gpt.GPTConfig(vocab=32, layers=2, width=16, heads=2, moe=experts)
    >>> params, kept = sl.models.decoding.experts_on_host(config, sl.models.gpt.init(config), slots=2)
    >>> len(sl.generate(config, params, [[1, 2, 3]], 5)[0])
    5
    >>> kept.tally.used >= 2 * 5
    True
    """
    if slots < 1:
        raise ValueError(f"experts_on_host(slots={slots}): a layer computes with one expert at least; give it a slot")
    decoder = decoder_of(model)
    params = given_params("experts_on_host", params)
    local = Local.of(params, "experts_on_host") if isinstance(params, (Sharded, Local)) else None
    tree = params if local is None else local.tree
    layers = decoder.layers_of_experts(tree)
    if not layers:
        raise TreeError(f"experts_on_host: {type(decoder).__name__} names no layers of experts of this model")
    if any(isinstance(leaf, StoredExperts) for leaf in leaves_of(tree)):
        raise TreeError(
            "experts_on_host: the experts are in host memory already; pass the parameters that it was given"
        )
    if local is None:
        device = _device_of(tree) if device is None else with_index(device)
        transfers = Transfers(device)
    else:
        device, transfers = local.mesh.device, local.mesh.transfers
        _refuse_slices(local, layers)
    stored: dict[int, StoredExperts] = {}
    stores = []
    for layer in layers:
        leaves = leaves_of(layer["experts"])
        number = leaves[0].shape[0]
        room = ExpertCache(leaves, min(slots, number), transfers, device)
        stores.append(LayerStore(room, 0 if local is None else _first(local, leaves[0]), number))
        stored |= {id(leaf): StoredExperts(leaf.shape, leaf.dtype, stores[-1], leaf.device) for leaf in leaves}
    tree = tree_map(lambda leaf: stored[id(leaf)] if id(leaf) in stored else leaf.to(device), tree)
    if ahead:
        for (store, after), layer in zip(pairwise(stores), decoder.layers_of_experts(tree)[1:]):
            store.ahead = NextLayer(after, partial(decoder.choices, layer))
    return tree if local is None else local.with_tree(tree), ExpertsOnHost(stores)


def _device_of(tree: Any) -> torch.device:
    devices = {leaf.device for leaf in leaves_of(tree)}
    return next((device for device in devices if device.type != "cpu"), default_device())


def _refuse_slices(local: Local, layers: Sequence[Mapping[str, Any]]) -> None:
    experts = {id(leaf) for layer in layers for leaf in leaves_of(layer["experts"])}
    if sliced := [place.path for place, leaf in local.leaves() if id(leaf) in experts and place.style is not None]:
        raise IllegalComposition(
            f"experts_on_host: ranks hold slices of each expert, whose sums all ranks make together ({', '.join(sliced)}): "
            "deal whole experts out with sl.experts(), or leave them out of the rules of sl.tensor_slicing"
        )


def _first(local: Local, leaf: Any) -> int:
    """The number of the first expert that a leaf has on this rank."""
    return next(local.window(placement).first[0] for placement, other in local.leaves() if other is leaf)

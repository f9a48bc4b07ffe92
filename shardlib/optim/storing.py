"""Conversion of parameters between the layout in which they are stored and the optimizer's layout."""

from __future__ import annotations

import torch

from shardlib.errors import TreeError
from shardlib.sharded.gather import Gather
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, check_alike, tree_map


def optimizer_shards(params: Sharded) -> dict[str, torch.Tensor]:
    """This rank's flat shards of the trained parameters in the optimizer's layout.

    Where parameters are stored in this layout, the shards are the stored buffers themselves, not copies.
    """
    shards = {}
    for bucket in params.plan.trained:
        index = bucket.owner(params.mesh.coords, bucket.param_level, bucket.levels)
        shards[bucket.name] = bucket.owner_segment(params.buffers[bucket.name], bucket.param_level, index)
    return shards


def store(params: Sharded, shards: dict[str, torch.Tensor]) -> None:
    """Write the optimizer's shards into the stored parameters in place, and gather parameters that are stored whole."""
    gathers = []
    for bucket in params.plan.trained:
        shard, stored = shards[bucket.name], params.buffers[bucket.name]
        if bucket.owners(bucket.param_level) > 1:
            narrow = shard.to(bucket.dtype)
            gathers.append(Gather(params.mesh, params.plan.routes[bucket.name].restore, narrow, stored))
        elif shard is not stored:
            stored.copy_(shard)
    for gather in gathers:
        gather.wait()


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, leaf by leaf, in the wider dtype and rounded to the parameter's. Changes nothing in place.

    Both are `Sharded`, or both are plain pytrees.

    Raises:
        TreeError: only one of them is `Sharded`, or leaves differ in number or shape.

    >>> sl.optim.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})["w"]
    tensor([1.5000, 0.5000])
    """
    if isinstance(params, Sharded) != isinstance(updates, Sharded):
        kinds = [type(tree).__name__ for tree in (params, updates)]
        raise TreeError(
            f"apply_updates: parameters are a {kinds[0]} and updates a {kinds[1]}; give both Sharded (tx.update returns "
            "Sharded updates for Sharded gradients), or both whole (sl.unshard)"
        )
    if not isinstance(params, Sharded):
        check_alike("apply_updates", updates, params, ("updates", "parameters"))
        return tree_map(lambda param, update: (param + update).to(param.dtype), params, updates)
    shards = optimizer_shards(params)
    return stored(params, {name: (shard + updates.buffers[name]).to(shard.dtype) for name, shard in shards.items()})


def stored(params: Sharded, shards: dict[str, torch.Tensor]) -> Sharded:
    """New parameters with the optimizer's ``shards``, and the other values of ``params``. Changes nothing in place."""
    result = Sharded(params.plan, params.mesh, "param", {name: b.clone() for name, b in params.buffers.items()})
    store(result, shards)
    return result

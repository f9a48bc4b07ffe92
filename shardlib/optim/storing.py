"""Conversion of parameters between the layout and memory in which they are stored and the optimizer's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from shardlib.common.devices import cloned
from shardlib.errors import IllegalComposition, TreeError
from shardlib.mesh.memories import Transfer
from shardlib.plan.buckets import Bucket
from shardlib.sharded.gather import Gather
from shardlib.sharded.tree import Sharded, require_no_shards
from shardlib.tree import Tree, check_alike, flatten, is_integral, same_values, ties, unflatten


def optimizer_shards(params: Sharded) -> dict[str, torch.Tensor]:
    """This rank's flat shards of the trained parameters in the optimizer's layout and memory.

    Where parameters are stored in this layout and memory, the shards are the stored buffers themselves, not copies.
    """
    return {bucket.name: optimizer_shard(params, bucket) for bucket in params.plan.trained}


def optimizer_shard(params: Sharded, bucket: Bucket) -> torch.Tensor:
    """One of `optimizer_shards`."""
    index = bucket.owner(params.mesh.coords, bucket.param_level, bucket.levels)
    shard = bucket.owner_segment(params.buffers[bucket.name], bucket.param_level, index)
    return (
        shard
        if bucket.memory.optimizer == bucket.memory.param
        else shard.to(params.mesh.device_for(bucket.memory.optimizer))
    )


class Storing:
    """The way of the optimizer's shards into the stored parameters, in place. Parameters that are stored whole are gathered.

    A shard in another memory comes by a transfer, which goes on beside the caller. On disk, parameters are written behind.

    Attributes:
        params: the stored parameters.
    """

    params: Sharded

    def __init__(self, params: Sharded) -> None:
        self.params, self._mesh = params, params.mesh
        self._arriving: dict[str, tuple[torch.Tensor, Transfer]] = {}
        self._gathered: set[str] = set()  # of buckets on disk that are stored whole

    def put(self, bucket: Bucket, shard: torch.Tensor) -> Transfer:
        """Take a shard. It must not change before the transfer, which is returned, and `finish` are over."""
        whole, transfer = bucket.owners(bucket.param_level) == 1, Transfer()
        if (on_disk := self.params.on_disk) is not None:
            values = shard.to(bucket.dtype)
            on_disk.files.put(bucket.name, values if whole else self._whole(bucket, values))
            return transfer
        stored = self.params.buffers[bucket.name]
        if shard.device != stored.device and (whole or stored.device == self._mesh.device):
            target = stored if whole else torch.empty(shard.numel(), dtype=bucket.dtype, device=stored.device)
            transfer = self._mesh.transfers.copy(shard.to(bucket.dtype), target)
            shard = target
        elif whole and shard is not stored:
            stored.copy_(shard)
        self._arriving[bucket.name] = shard, transfer
        return transfer

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        """A bucket on the device, gathered."""
        whole = Gather(self._mesh, self.params.plan.routes[bucket.name].restore, shard).wait()
        self._gathered.add(bucket.name)
        return whole

    def join_collectives(self, groups: Iterable[Iterable[Bucket]]) -> None:
        """On a rank whose update has failed: take part in the gathers that other ranks' updates make on their way.

        Args:
            groups: buckets, in the order of their updates.
        """
        for bucket in (bucket for group in groups for bucket in group):
            missing = bucket.owners(bucket.param_level) > 1 and bucket.name not in self._gathered
            if self.params.on_disk is not None and missing:
                self._whole(bucket, torch.zeros(bucket.owned, dtype=bucket.dtype, device=self._mesh.device))

    def finish(self) -> None:
        """Let what the device does from now on see the new parameters. Two gathers at most are under way."""
        gathers: deque[Gather] = deque()
        for bucket in self.params.plan.trained if self.params.on_disk is None else ():
            shard, transfer = self._arriving.pop(bucket.name)
            stored, route = self.params.buffers[bucket.name], self.params.plan.routes[bucket.name].restore
            if stored.device != self._mesh.device:
                transfer.wait()  # the host may read it next
            transfer.join()
            if bucket.owners(bucket.param_level) == 1:
                continue
            if stored.device == self._mesh.device:
                if len(gathers) == 2:
                    gathers.popleft().wait()
                gathers.append(Gather(self._mesh, route, shard.to(bucket.dtype), stored))
            else:
                whole = Gather(self._mesh, route, shard.to(bucket.dtype)).wait()
                self._mesh.transfers.copy(whole, stored).wait()
        while gathers:
            gathers.popleft().wait()


def store(params: Sharded, shards: dict[str, torch.Tensor]) -> None:
    """Write the optimizer's shards into the stored parameters in place, and gather parameters that are stored whole."""
    storing = Storing(params)
    for bucket in params.plan.trained:
        storing.put(bucket, shards[bucket.name])
    storing.finish()


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, leaf by leaf, in the wider dtype and rounded to the parameter's. Changes nothing in place.

    Both are `Sharded`, or both are plain pytrees. Leaves of a plain tree that are tied stay one tensor if they have the same
    update, and integers without one (None) stay what they are.

    Raises:
        TreeError: only one of them is `Sharded`, or leaves differ in number or shape.
        IllegalComposition: the parameters have fp32 masters, which only a train step keeps.

    >>> sl.optim.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})["w"]
    tensor([1.5000, 0.5000])
    """
    if isinstance(params, Sharded) != isinstance(updates, Sharded):
        kinds = [type(tree).__name__ for tree in (params, updates)]
        raise TreeError(
            f"apply_updates: parameters are a {kinds[0]} and updates a {kinds[1]}; give both Sharded (tx.update returns "
            "Sharded updates for Sharded gradients), or both whole (sl.unshard)"
        )
    if isinstance(updates, Sharded) and updates.role != "grad":
        raise TreeError("apply_updates: these are parameters, where updates are due; give what tx.update returned")
    if not isinstance(params, Sharded):
        require_no_shards("apply_updates", (params, updates))
        return _applied(params, updates)
    if mastered := sorted(path for bucket in params.plan.trained if bucket.master_dtype for path in bucket.paths):
        raise IllegalComposition(
            f"apply_updates would round small updates of {len(mastered)} 16-bit parameters ({mastered[0]} first) to nothing. "
            "Use sl.make_train_step, or sl.precision(..., master=False) with sl.optim.stochastic_rounding(tx), or keep the "
            "parameters in fp32"
        )
    shards = optimizer_shards(params)
    return stored(params, {name: (shard + updates.buffers[name]).to(shard.dtype) for name, shard in shards.items()})


def _applied(params: Tree, updates: Tree) -> Tree:
    """`apply_updates` of plain pytrees."""
    paths, leaves, treedef = flatten(params)
    given_paths, given, _ = flatten(updates)
    by_path = dict(zip(given_paths, given, strict=True))
    fixed = {path for path, leaf in zip(paths, leaves) if is_integral(leaf.dtype) and path not in by_path}
    moving = unflatten(treedef, [None if path in fixed else leaf for path, leaf in zip(paths, leaves)])
    check_alike("apply_updates", updates, moving, ("updates", "parameters"))
    moved: dict[str, torch.Tensor] = {}
    for path, leaf, owner in zip(paths, leaves, ties(leaves)):
        first = paths[owner]
        if path in fixed:
            moved[path] = leaf
        elif first in moved and same_values(by_path[first], by_path[path]):
            moved[path] = moved[first]
        else:
            moved[path] = (leaf + by_path[path]).to(leaf.dtype)
    return unflatten(treedef, [moved[path] for path in paths])


def stored(params: Sharded, shards: dict[str, torch.Tensor]) -> Sharded:
    """New parameters with the optimizer's ``shards``, and the other values of ``params``. Changes nothing in place."""
    result = Sharded(params.plan, params.mesh, "param", {name: cloned(b) for name, b in params.buffers.items()})
    store(result, shards)
    return result

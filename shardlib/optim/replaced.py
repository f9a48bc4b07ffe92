"""The optimizer's copies of parameters (masters, slow parameters), made to follow when a caller replaces the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch

from shardlib.common.devices import cloned
from shardlib.common.thresholds import chunks
from shardlib.errors import IllegalComposition
from shardlib.optim.base import Packed
from shardlib.optim.on_disk import OnDisk, PendingChange
from shardlib.optim.storing import optimizer_shard
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


def following_masters(params: Sharded, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters that round to ``params``. Elements of ``masters`` that do so already stay; the others become the parameters.

    Changes nothing in place.
    """
    bucket_of = params.plan.bucket_of
    return {
        name: _changed(master, lambda old, name=name: _following(optimizer_shard(params, bucket_of[name]), old))  # type: ignore[misc]
        for name, master in masters.items()
    }


def following_state(params: Sharded, masters: Mapping[str, torch.Tensor], state: Tree) -> Tree:
    """An optimizer's state whose `Holding` trees hold ``params``. Changes nothing in place.

    Raises:
        IllegalComposition: ranks have diverged.
    """

    @functools.lru_cache(maxsize=1)  # what is elsewhere is brought here one bucket at a time
    def flat(name: str) -> torch.Tensor:
        master: Any = masters.get(name)
        if master is None:
            return optimizer_shard(params, params.plan.bucket_of[name])
        return master.unpacked() if isinstance(master, Packed) else master

    def held(name: str, old: Any) -> Any:
        named = params.plan.numbering.run_named(name)
        assert named is not None, name  # names of a bucket or a run of its leaves
        bucket, start, stop = params.plan.numbering.span(named[1])
        return _changed(old, lambda tensor: flat(bucket)[start:stop].to(tensor.dtype, copy=True))

    def followed(node: Any) -> Any:
        if not _holds(node):
            return node
        if getattr(node, "rank_local", tuple)():
            raise IllegalComposition(
                "parameters were replaced while they are rank-local (the optimizer sent nothing in its last step); "
                "replace them after a step that sends: sl.optim.ZeroOneSteps(...).sent(state.step) is not Sent.NOTHING"
            )
        fresh = {field: {n: held(n, old) for n, old in getattr(node, field).items()} for field in node.held_trees()}
        return type(node)(*(fresh.get(field, walk(tree)) for field, tree in zip(node._fields, node, strict=True)))

    def walk(tree: Tree) -> Tree:
        return optree.tree_map(followed, tree, is_leaf=_holds)

    return walk(state)


def _holds(node: Any) -> bool:
    return hasattr(node, "held_trees")


def _changed(held: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What ``change`` makes of a tensor; one on disk is `PendingChange` then, and one in few bits gets its values there."""
    if not isinstance(held, Packed):
        return change(held)
    if isinstance(held, OnDisk):
        return PendingChange(held, change)
    held.pack(change(held.unpacked()))
    return held


def _following(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A new master, in memory as ``master`` is."""
    result = cloned(master)
    for p, m in chunks([param, result]):
        m.copy_(torch.where(m.to(p.dtype) == p, m, p.to(m.dtype)))
    return result

"""What an optimizer keeps of parameters, brought along when these are replaced from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from shardlib.errors import IllegalComposition
from shardlib.mesh.chunks import chunks
from shardlib.optim.storing import optimizer_shards
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


def following_masters(params: Sharded, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters that round to ``params``: those that do already stay, digits and all; the others become the parameters.

    Changes nothing in place.
    """
    shards = optimizer_shards(params)
    return {name: _following(shards[name], master) for name, master in masters.items()}


def following_state(params: Sharded, masters: Mapping[str, torch.Tensor], state: Tree) -> Tree:
    """An optimizer's state whose `Holding` trees hold ``params``. Changes nothing in place.

    Raises:
        IllegalComposition: ranks have diverged.
    """
    flat = optimizer_shards(params) | dict(masters)

    def held(name: str, old: torch.Tensor) -> torch.Tensor:
        named = params.plan.numbering.run_named(name)
        assert named is not None, name  # of the parameters that the optimizer has, all or some
        bucket, start, stop = params.plan.numbering.span(named[1])
        return flat[bucket][start:stop].to(old.dtype, copy=True)

    def node(found: Any) -> Any:
        if not _holds(found):
            return found
        if getattr(found, "rank_local", tuple)():
            raise IllegalComposition(
                "parameters were replaced while they are rank-local (the optimizer sent nothing in its last step); "
                "replace them after a step that sends: sl.optim.ZeroOneSteps(...).sent(state.step) is not Sent.NOTHING"
            )
        fresh = {field: {n: held(n, old) for n, old in getattr(found, field).items()} for field in found.held_trees()}
        return type(found)(*(fresh.get(field, walk(part)) for field, part in zip(found._fields, found, strict=True)))

    def walk(tree: Tree) -> Tree:
        return optree.tree_map(node, tree, is_leaf=_holds)

    return walk(state)


def _holds(node: Any) -> bool:
    return hasattr(node, "held_trees")


def _following(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    found = master.clone()
    for p, m in chunks([param, found]):
        m.copy_(torch.where(m.to(p.dtype) == p, m, p.to(m.dtype)))
    return found

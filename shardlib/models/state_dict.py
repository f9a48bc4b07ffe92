"""The way back from `from_module`: trained parameters under the names that the module itself gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardlib.errors import TreeError
from shardlib.models.from_module import Blocks, flat
from shardlib.models.meta import reset_buffers
from shardlib.models.refusals import require_all_used, require_module
from shardlib.models.skeleton import Buffers, Skeleton, buffers_of, hollow
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import unshard
from shardlib.tree import Tree


def state_dict(
    module: nn.Module, params: Tree, buffers: Buffers | None = None, *, blocks: Sequence[nn.Module] | None = None
) -> dict[str, Any]:
    """What ``module.state_dict()`` would be with these parameters: for ``load_state_dict``, ``save_pretrained``, files.

    The module itself is left as it is: ``module.load_state_dict(sl.models.state_dict(module, state.params))`` writes to it.
    Where ``params`` are `Sharded` every rank calls this, as it calls `shardlib.unshard`, and gets all of it (stages' and
    slices' parameters included); write files on one rank alone. Tied parameters are one tensor under each of their names.

    Args:
        module: the one that `from_module` was given.
        params: as `from_module` made them: a tree, or `Sharded` (``state.params``).
        buffers: as ``apply`` returned them (``state.buffers``); by default the module's own.
        blocks: those that `from_module` was given, or blocks made of the module in the same way.

    Raises:
        TreeError: the parameters of another module, or of other blocks.
    """
    require_module(module)
    named = flat(unshard(params) if isinstance(params, Sharded) else params)
    if blocks is not None:
        require_all_used(module, blocks)
        place = {id(leaf): name for name, leaf in Blocks(blocks).named_parameters(remove_duplicate=False)}
        if missing := sorted(set(place.values()) - named.keys()):
            raise TreeError(
                f"these parameters are not those of the {len(blocks)} blocks: {missing[0]} is not among them. Pass the list "
                "of trees that sl.from_module(module, blocks=...) returned, and the same blocks"
            )
        named = {name: named[place[id(leaf)]] for name, leaf in module.named_parameters(remove_duplicate=False)}
    copied = hollow(module)
    held = buffers_of(copied) | dict(buffers or {})
    if any(buffer is not None and buffer.is_meta for buffer in held.values()):
        held |= reset_buffers(module)
    skeleton = Skeleton(copied, copied)
    skeleton.require_names(named, held)
    with skeleton.holding(named, held), torch.no_grad():
        return copied.state_dict()

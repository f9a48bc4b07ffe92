"""The inverse of `from_module`: trained parameters as a state dict of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardlib.errors import TreeError, listing
from shardlib.models.from_module import BlockList, flat
from shardlib.models.meta import reset_buffers
from shardlib.models.refusals import require_all_used, require_module
from shardlib.models.skeleton import Buffers, Skeleton, buffers_of
from shardlib.models.skeletons import hollow
from shardlib.sharded.given import given_buffers, given_params
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import unshard
from shardlib.tree import Tree


def state_dict(
    module: nn.Module, params: Tree, buffers: Buffers | None = None, *, blocks: Sequence[nn.Module] | None = None
) -> dict[str, Any]:
    """``module.state_dict()`` with ``params``, for ``load_state_dict``, ``save_pretrained`` and files.

    The module does not change; ``module.load_state_dict(sl.models.state_dict(module, state.params))`` writes to it. If
    ``params`` are `Sharded`, all ranks must call this, as `shardlib.unshard`, and each gets the whole dictionary, with the
    parameters of other stages and slices; write files on one rank. Tied parameters are one tensor under each of their names.

    Args:
        module: the argument of `from_module`.
        params: as `from_module` returned them: a tree, or `Sharded`, or a `TrainState` of them.
        buffers: as ``apply`` returned them; by default those of the state, if ``params`` are one that has buffers, else the
            buffers of ``module`` (``buffers={}`` for these in any case).
        blocks: the argument of `from_module`, or blocks made of the module in the same way.

    Raises:
        TreeError: ``params`` or ``buffers`` are those of another module, or of other blocks.
    """
    require_module(module)
    buffers = given_buffers(params) if buffers is None else buffers
    _require_buffers(module, buffers)
    params = given_params("state_dict", params)
    named = flat(unshard(params) if isinstance(params, Sharded) else params)
    if blocks is not None:
        require_all_used(module, blocks)
        names = {id(leaf): name for name, leaf in BlockList(blocks).named_parameters(remove_duplicate=False)}
        if missing := sorted(set(names.values()) - named.keys()):
            raise TreeError(
                f"these parameters are not those of the {len(blocks)} blocks: {missing[0]} is not among them. Pass the list "
                "of trees that sl.from_module(module, blocks=...) returned, and the same blocks"
            )
        named = {name: named[names[id(leaf)]] for name, leaf in module.named_parameters(remove_duplicate=False)}
    copied = hollow(module)
    held = buffers_of(copied) | dict(buffers or {})
    if any(buffer is not None and buffer.is_meta for buffer in held.values()):
        held |= reset_buffers(module)
    skeleton = Skeleton(copied, {})
    skeleton.require_names(named, held)
    with skeleton.holding(named, held), torch.no_grad():
        return copied.state_dict()


def _require_buffers(module: nn.Module, buffers: Any) -> None:
    """Refuse buffers that are no dictionary from names to tensors, such as a state's that has a loss function's own beside
    the module's."""
    if buffers is None:
        return
    named = buffers if isinstance(buffers, Mapping) else {f"(all, a {type(buffers).__name__})": buffers}
    if wrong := [f"{name}" for name, leaf in named.items() if not isinstance(leaf, torch.Tensor | None)]:
        raise TreeError(
            f"these are not the buffers of {type(module).__name__}:\n{listing(wrong)}\nPass buffers=, the part of "
            "state.buffers that sl.from_module returned"
        )

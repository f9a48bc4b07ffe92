"""Results must be pytrees: tensors that an object hides cannot be detached, copied, gathered, averaged or sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.common.hidden import hides
from shardlib.errors import LossError, listing
from shardlib.execute.handles import Handle
from shardlib.nn.functional import Mean
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, adopt, flatten, tree_map


def outside(tree: Tree, what: str, in_parameters: Callable[[torch.Tensor], bool]) -> Tree:
    """The results of a function, detached, with values that later steps do not change.

    Tensors in the memory of parameters are copied, since the optimizer writes to that memory or it is released. Handles are
    gathered, on every rank; handles of slices, and objects that hide tensors, are refused.

    Args:
        what: the results' name, for messages.
        in_parameters: tells whether a tensor lies in the memory of parameters.
    """
    require_open(tree, what)

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with torch.no_grad():
            if isinstance(leaf, Handle):
                return leaf.clone()
            leaf = leaf.detach()
            if leaf.layout is not torch.strided:
                return leaf
            return leaf.clone() if in_parameters(leaf) else leaf

    return tree_map(kept, tree)


def storages_of(params: Sharded) -> frozenset[int]:
    """The identities of the storages in which this rank's parameters are stored, but for those on disk."""
    return frozenset(storage_id(buffer.untyped_storage()) for buffer in params.in_memory.values())


def require_open(tree: Tree, what: str) -> None:
    """Refuse objects in a result that hide tensors or a `Mean`; classes that torch's pytrees know become pytrees.

    Args:
        what: the result's name, for the message.

    Raises:
        LossError: lists all of them, by path and class.
    """
    adopt(tree)
    paths, leaves, _ = flatten(tree)
    hidden = [
        f"{path or what}: {type(leaf).__name__}{'; dict(...) of it is one' if isinstance(leaf, Mapping) else ''}"
        for path, leaf in zip(paths, leaves, strict=True)
        if hides(leaf, (torch.Tensor, Mean))
    ]
    if hidden:
        raise LossError(
            f"{what}: objects that hold tensors, or sl.Mean, and are not pytrees:\n{listing(hidden)}\nReturn a dict or a "
            "tuple of what you need of them, or register the class (optree.register_pytree_node)"
        )

"""Results must be pytrees: tensors that an object hides cannot be detached, copied, gathered, averaged or sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardlib.common.hidden import hides
from shardlib.errors import LossError, listing
from shardlib.nn.functional import Mean
from shardlib.tree import Tree, adopt, flatten


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

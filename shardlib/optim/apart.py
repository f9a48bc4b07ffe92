"""States in memory of their own, where an update writes to memory in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.common.pages import cloned
from shardlib.tree import Tree, tree_map


def apart(state: Tree, others: Iterable[torch.Tensor]) -> Tree:
    """An optimizer's state none of whose tensors is in the memory of another one, or of ``others``, which are written to.

    Transformations are pure functions, so that one may keep the parameters or the updates that it returns in its state, or
    begin two means with the same zeros.
    """
    taken = defaultdict[int, list[range]](list)  # bytes of each storage
    for other in others:
        taken[storage_id(other.untyped_storage())].append(_bytes(other))

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        here, spans = _bytes(leaf), taken[storage_id(leaf.untyped_storage())]
        if any(here.start < span.stop and span.start < here.stop for span in spans):
            return cloned(leaf)
        spans.append(here)
        return leaf

    return tree_map(own, state)


def _bytes(tensor: torch.Tensor) -> range:
    """The bytes of its storage in which a tensor's elements lie."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return range(first * tensor.itemsize, (last + 1) * tensor.itemsize if tensor.numel() else 0)

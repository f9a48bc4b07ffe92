"""Marks on the memory of shards that were read out of sharded trees, so that none is taken for a plain tree of one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.errors import TreeError, listing
from shardlib.tree import flatten

_marked: dict[int, Any] = {}  # identity of a storage -> a weak reference to it


def mark(buffers: Iterable[torch.Tensor]) -> None:
    """Note that views of these buffers are shards."""
    for buffer in buffers:
        storage = buffer.untyped_storage()
        _marked[storage_id(storage)] = weakref.ref(storage)


def require_no_shards(what: str, tree: Any) -> None:
    """Refuse shards among the leaves of a plain tree.

    Args:
        what: the function that was given the tree, for the message.

    Raises:
        TreeError: lists them.
    """
    if not _marked:
        return
    paths, leaves, _ = flatten(tree)
    shards = [
        f"{path or 'the tree'}: {tuple(leaf.shape)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if _is_shard(leaf)
    ]
    if shards:
        raise TreeError(
            f"{what} was given a part of a sharded tree, whose leaves are this rank's shards and would be taken for plain "
            f"tensors of one device:\n{listing(shards)}\nGive the whole tree, of which the function may use a part and "
            "sl.freeze(globs) keeps the rest; or take the part out of sl.unshard(params) and shard it by itself"
        )


def _is_shard(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return False
    try:
        key = storage_id(leaf.untyped_storage())
    except (NotImplementedError, RuntimeError):  # of a class without memory
        return False
    storage = _marked.get(key)
    if storage is not None and storage() is None:  # another one's memory now
        del _marked[key]
        return False
    return storage is not None

"""States that optimizers keep in fewer bits (see `shardlib.optim.base.Packed`), as the tensors they stand for and back."""

from __future__ import annotations

from typing import Any

import optree

from shardlib.optim.base import Packed
from shardlib.optim.train_state import TrainState


def unpacked(state: TrainState) -> TrainState:
    """The same state with whole tensors in place of packed ones; all else is the same memory."""
    opt: Any = state.opt
    opt = optree.tree_map(lambda node: node.unpacked() if _is_packed(node) else node, opt, is_leaf=_is_packed)
    return TrainState(state.step, state.params, opt, state.comm, state.buffers, state.scale, state.rng)


def pack(state: TrainState, whole: TrainState) -> None:
    """Bring the packed tensors of ``state`` to what they are in ``whole``, which is `unpacked` of it."""
    trees: list[Any] = [state.opt, whole.opt]
    kept, tensors = (optree.tree_leaves(tree, is_leaf=_is_packed) for tree in trees)
    for node, values in zip(kept, tensors, strict=True):
        if _is_packed(node):
            node.pack(values)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)

"""Conversion between packed optimizer states (see `shardlib.optim.base.Packed`) and the tensors that they encode."""

from __future__ import annotations

from typing import Any

import optree

from shardlib.optim.base import Packed
from shardlib.optim.train_state import TrainState


def unpacked(state: TrainState) -> TrainState:
    """The same state with decoded tensors instead of packed ones. All other leaves share memory with ``state``."""
    opt: Any = state.opt
    opt = optree.tree_map(lambda node: node.unpacked() if _is_packed(node) else node, opt, is_leaf=_is_packed)
    return TrainState(state.step, state.params, opt, state.comm, state.buffers, state.scale, state.rng)


def pack(state: TrainState, whole: TrainState) -> None:
    """Encode the tensors of ``whole``, which came from ``unpacked(state)``, into the packed leaves of ``state``."""
    trees: list[Any] = [state.opt, whole.opt]
    nodes, tensors = (optree.tree_leaves(tree, is_leaf=_is_packed) for tree in trees)
    for node, values in zip(nodes, tensors, strict=True):
        if _is_packed(node):
            node.pack(values)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)

"""The trees that a checkpoint is made of, with tensors in place of numbers and of packed optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from shardlib.common._compat import storage_id
from shardlib.errors import TreeError, listing
from shardlib.optim.base import Packed
from shardlib.optim.on_disk import buckets_on_disk
from shardlib.optim.train_state import OptimizerState, TrainState, copied
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, named_leaves, path_name, tied_pairs, unflatten


class CheckpointTrees(NamedTuple):
    """The trees of a checkpoint.

    Attributes:
        params, opt, comm, buffers: of the `TrainState`.
        also: name -> further tree of tensors in the optimizer's layout (the state of `shardlib.optim.ema`), or equal on all
            ranks.
        packed: storage of a tensor without memory -> the packed tensor that it stands for.
        numbers: name -> the tensor that stands for a number (or array of numbers) in ``opt`` or ``buffers``.
    """

    params: Sharded
    opt: OptimizerState
    comm: dict[str, torch.Tensor]
    buffers: Any
    also: Mapping[str, Any]
    packed: Mapping[int, Packed]
    numbers: Mapping[str, torch.Tensor]


def trees_of(state: TrainState, also: Mapping[str, Any] | None = None) -> CheckpointTrees:
    """The trees of a state and of ``also``, with tensors without memory instead of packed ones; all others share memory with
    them, except those that stand for numbers. Raises `TreeError` for leaves of ``also`` that are no tensors."""
    packed: dict[int, Packed] = {}

    def outline(node: Any) -> Any:
        return _outline(node, packed) if isinstance(node, Packed) else node

    trees: Any = (state.opt, dict(also or {}))
    replaced: Any = optree.tree_map(outline, trees, is_leaf=lambda node: isinstance(node, Packed))
    opt, further = replaced
    _require_tensors(further)
    params, on_disk = params_of(state.params)
    numbers = _tensors_of_numbers("opt", opt) | _tensors_of_numbers("buffers", state.buffers)
    return CheckpointTrees(params, opt, state.comm, state.buffers, further, packed | on_disk, numbers)


def fillable(state: TrainState, also: Mapping[str, Any] | None = None) -> CheckpointTrees:
    """`trees_of` a state that are to be filled in place. Buffers have memory of their own: those that a loss returned, or a
    caller gave, may be one tensor or views of a batch. Raises `TreeError` for tensors of ``also`` that are one."""
    trees = trees_of(state, also)
    if one := tied_pairs(trees.also):
        raise TreeError(
            f"also: these are one tensor, which cannot be filled twice:\n{listing([' and '.join(pair) for pair in one])}\n"
            "Clone one of them."
        )
    return trees._replace(buffers=copied(state.buffers))


def params_of(params: Sharded) -> tuple[Sharded, dict[int, Packed]]:
    """The parameters, with tensors without memory in place of those on disk; and `CheckpointTrees.packed` of these."""
    packed: dict[int, Packed] = {}
    if params.on_disk is None:
        return params, packed
    outlines = {name: _outline(node, packed) for name, node in buckets_on_disk(params).items()}
    return Sharded(params.plan, params.mesh, params.role, outlines), packed


def _outline(node: Packed, packed: dict[int, Packed]) -> torch.Tensor:
    like = node.like
    packed[storage_id(like.untyped_storage())] = node
    return like


def _require_tensors(also: Any) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(also, is_leaf=lambda node: isinstance(node, Sharded))
    named = zip(map(path_name, paths), leaves, strict=True)
    if wrong := [f"{name}: {type(leaf).__name__}" for name, leaf in named if not isinstance(leaf, torch.Tensor)]:
        raise TreeError(
            f"also: these are no tensors:\n{listing(wrong)}\nPut numbers into notes=, and give the state of an average."
        )


# Numbers in an optimizer's state and in buffers: Python's and NumPy's, for each of which a tensor is saved.

_PYTHONS = (bool, int, float, complex)
# Of these kinds a leaf of a fresh state is as it was.
_CONSTANT = (str, bytes, Enum, torch.dtype, torch.device)


def with_numbers(trees: CheckpointTrees, state: TrainState) -> tuple[OptimizerState, Any]:
    """The optimizer's state of ``state`` and the buffers of its ``trees``, with the values of their numbers."""
    return _with_numbers("opt", state.opt, trees.numbers), _with_numbers("buffers", trees.buffers, trees.numbers)


def _with_numbers(prefix: str, tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    names = [f"{prefix}/{path_name(path)}" for path, _ in named_leaves(tree)]
    if tensors.keys().isdisjoint(names):
        return tree
    _, leaves, treedef = flatten(tree)
    named = zip(names, leaves, strict=True)
    return unflatten(treedef, [_number(leaf, tensors[name]) if name in tensors else leaf for name, leaf in named])


def _tensors_of_numbers(prefix: str, tree: Any) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{path_name(path)}": _tensor(leaf) for path, leaf in named_leaves(tree) if _is_number(leaf)}


def require_kept(prefix: str, tree: Any) -> None:
    """Refuse leaves that a checkpoint would lose: neither tensors nor numbers, nor of a kind that does not change."""
    lost = [
        f"{prefix}/{path_name(path)}: {type(leaf).__name__}"
        for path, leaf in named_leaves(tree)
        if not (isinstance(leaf, (torch.Tensor, *_CONSTANT)) or callable(leaf) or _is_number(leaf))
    ]
    if lost:
        raise TreeError(
            f"a checkpoint would lose these, neither tensors nor 64-bit numbers:\n{listing(lost)}\nHold them in tensors."
        )


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufc" and leaf.dtype.itemsize <= (16 if leaf.dtype.kind == "c" else 8)
    return type(leaf) in _PYTHONS and (type(leaf) is not int or -(2**63) <= leaf < 2**63)


def _tensor(number: Any) -> torch.Tensor:
    if isinstance(number, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(number))
    return torch.tensor(number, dtype={float: torch.float64, complex: torch.complex128}.get(type(number)))


def _number(like: Any, tensor: torch.Tensor) -> Any:
    """The value of a tensor as a number of the type of ``like``."""
    if isinstance(like, np.ndarray):
        return tensor.numpy()
    return tensor.numpy()[()] if isinstance(like, np.generic) else tensor.item()

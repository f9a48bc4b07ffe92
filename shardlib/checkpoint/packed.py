"""What a checkpoint is made of: a train state and further trees, with the tensors that packed optimizer states encode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch

from shardlib.checkpoint.numbers import tensors_of_numbers, with_numbers
from shardlib.common._compat import storage_id
from shardlib.errors import TreeError, listing
from shardlib.optim.base import Packed
from shardlib.optim.on_disk import buckets_on_disk
from shardlib.optim.train_state import OptimizerState, TrainState, copied
from shardlib.sharded.tree import Sharded
from shardlib.tree import path_name, tied_pairs


class CheckpointTrees(NamedTuple):
    """The trees of a checkpoint.

    Attributes:
        params, opt, comm, buffers: of the `TrainState`.
        also: name -> further tree of tensors in the optimizer's layout (the state of `shardlib.optim.ema`), or equal on all
            ranks.
        packed: storage of a tensor without memory -> the packed tensor that it stands for.
        numbers: name -> the tensor that stands for a number in ``opt`` or ``buffers``; see `shardlib.checkpoint.numbers`.
    """

    params: Sharded
    opt: OptimizerState
    comm: dict[str, torch.Tensor]
    buffers: Any
    also: Mapping[str, Any]
    packed: Mapping[int, Packed]
    numbers: Mapping[str, torch.Tensor]


def outlined(state: TrainState, also: Mapping[str, Any] | None = None) -> CheckpointTrees:
    """The trees of a state and of ``also``, with tensors without memory instead of packed ones; all others share memory with
    them, except those that stand for numbers.

    Raises:
        TreeError: ``also`` has leaves that are no tensors.
    """
    packed: dict[int, Packed] = {}

    def outline(node: Packed) -> torch.Tensor:
        like = node.like
        packed[storage_id(like.untyped_storage())] = node
        return like

    trees: Any = [state.opt, dict(also or {})]
    replaced: Any = optree.tree_map(lambda node: outline(node) if _is_packed(node) else node, trees, is_leaf=_is_packed)
    opt, further = replaced
    _require_tensors(further)
    params, on_disk = outlined_params(state.params)
    numbers = tensors_of_numbers("opt", opt) | tensors_of_numbers("buffers", state.buffers)
    return CheckpointTrees(params, opt, state.comm, state.buffers, further, packed | on_disk, numbers)


def fillable(state: TrainState, also: Mapping[str, Any] | None = None) -> CheckpointTrees:
    """`outlined` trees that are to be filled in place. Buffers have memory of their own: those that a loss returned, or a
    caller gave, may be one tensor or views of a batch.

    Raises:
        TreeError: as `outlined`, and tensors of ``also`` that are one.
    """
    parts = outlined(state, also)
    if one := tied_pairs(parts.also):
        raise TreeError(
            "also: these are one tensor, and each is filled with values of its own:\n"
            f"{listing([' and '.join(pair) for pair in one])}\nClone one of them: tensor.clone()"
        )
    return parts._replace(buffers=copied(state.buffers))


def with_numbers_of(parts: CheckpointTrees, state: TrainState) -> tuple[OptimizerState, Any]:
    """The optimizer's state and the buffers of a state, with the numbers of its `outlined` parts."""
    return with_numbers("opt", state.opt, parts.numbers), with_numbers("buffers", parts.buffers, parts.numbers)


def outlined_params(params: Sharded) -> tuple[Sharded, dict[int, Packed]]:
    """The parameters, with tensors without memory in place of those on disk; and storage of such a tensor -> what it stands
    for."""
    if params.on_disk is None:
        return params, {}
    nodes = buckets_on_disk(params)
    outlines = {name: node.like for name, node in nodes.items()}
    packed: dict[int, Packed] = {storage_id(outlines[name].untyped_storage()): node for name, node in nodes.items()}
    return Sharded(params.plan, params.mesh, params.role, outlines), packed


def _require_tensors(also: Any) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(also, is_leaf=lambda node: isinstance(node, Sharded))
    wrong = [
        f"{path_name(path)}: {type(leaf).__name__}"
        for path, leaf in zip(paths, leaves, strict=True)
        if not isinstance(leaf, torch.Tensor)
    ]
    if wrong:
        raise TreeError(
            f"also: these are no tensors:\n{listing(wrong)}\nPut numbers and text into notes=, and give an average's state "
            "(what its update returns second), not the averaged parameters."
        )


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)

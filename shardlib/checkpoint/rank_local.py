"""Rank-local tensors (see `shardlib.optim.base.RankLocal`), saved and restored.

On as many ranks as saved them, every rank gets back what it had. On any other number, all ranks get the mean of the saved
tensors, to which the optimizer brings them anyway when it next exchanges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch

from shardlib.checkpoint.fragments import MASTERS, PARAMS, Fragment, bucket_fragments, needed_fragments
from shardlib.checkpoint.reading import BUFFER, Saved
from shardlib.optim.train_state import TrainState
from shardlib.tree import path_name

PREFIX = "rank_local/"


def diverged_axis(state: TrainState) -> str | None:
    """The axis whose ranks do not have equal parameters now, or None."""
    owner = state.params.plan.reductions.owner
    return owner.axis if owner is not None and _rank_local_trees(state.opt) else None


def rank_local_fragments(state: TrainState) -> Iterator[Fragment]:
    """Fragments of the parameters and of the trees of the optimizer's state that are rank-local now."""
    plan, mesh, axis = state.params.plan, state.params.mesh, diverged_axis(state)
    if axis is None:
        return
    prefixes = (PARAMS, MASTERS, *(f"opt/{path_name(path)}/" for path in _rank_local_trees(state.opt)))
    for bucket in plan.buckets:
        copies = [mesh.coords[other] for other in plan.copies(bucket) if other != axis]
        if plan.counts(bucket, mesh.coords) and not any(copies):
            for fragment in bucket_fragments(state, bucket):
                if fragment.name.startswith(prefixes):
                    yield fragment._replace(name=_name(fragment, mesh.coords[axis], mesh.shape[axis]))


def restore_rank_local(state: TrainState, saved: Saved) -> None:
    """Fill the tensors of ``state`` that were rank-local when they were saved."""
    plan, mesh = state.params.plan, state.params.mesh
    first = next((name for name in saved.names if name.startswith(PREFIX)), None)
    if first is None:
        return
    ways = int(first.removeprefix(PREFIX).partition("/")[0].rpartition(" of ")[2])
    axis = plan.reductions.owner.axis if plan.reductions.owner is not None else None
    for fragment in needed_fragments(state):
        if _name(fragment, 0, ways) not in saved.tensors:
            continue
        if axis is not None and mesh.shape[axis] == ways:
            saved.fill(fragment, _name(fragment, mesh.coords[axis], ways))
            continue
        for part in fragment.parts(BUFFER // 16):
            total = torch.zeros_like(part.data, dtype=torch.float64)
            for rank in range(ways):
                held = part._replace(data=torch.zeros_like(part.data))
                saved.fill(held, _name(fragment, rank, ways))
                total += held.data
            part.data.copy_(total / ways)


def _name(fragment: Fragment, rank: int, ways: int) -> str:
    return f"{PREFIX}{rank} of {ways}/{fragment.name}"


def _rank_local_trees(opt: Any) -> list[tuple[Any, ...]]:
    """The paths in the optimizer's state of the trees that are rank-local now."""
    trees = []
    paths, nodes, _ = optree.tree_flatten_with_path(opt, is_leaf=lambda node: hasattr(node, "rank_local"))
    for path, node in zip(paths, nodes, strict=True):
        if hasattr(node, "rank_local"):
            trees += [(*path, node._fields.index(field)) for field in node.rank_local()]
    return trees

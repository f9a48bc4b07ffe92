"""What ranks that share a batch hold each for itself at times, saved and restored: see `shardlib.optim.base.Apart`.

On as many ranks each gets its own back. On others all get the mean, which is what they are brought to when they next meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from shardlib.checkpoint.overlap import fill
from shardlib.checkpoint.pieces import MASTERS, PARAMS, Piece, bucket_pieces, needed_pieces
from shardlib.optim.train_state import TrainState
from shardlib.tree import path_name


def own_pieces(state: TrainState) -> Iterator[Piece]:
    """Parameters and trees of the optimizer's state, where they are this rank's own."""
    plan, mesh = state.params.plan, state.params.mesh
    trees = _own_trees(state.opt)
    if plan.reductions.owner is None or not trees:
        return
    mine = (PARAMS, MASTERS, *(f"opt/{path_name(path)}/" for path in trees))
    axis = plan.reductions.owner.axis
    for bucket in plan.buckets:
        others = [mesh.coords[other] for other in plan.copies(bucket) if other != axis]
        if plan.counts(bucket, mesh.coords) and not any(others):
            for piece in bucket_pieces(state, bucket):
                if piece.name.startswith(mine):
                    yield piece._replace(name=_name(piece, mesh.coords[axis], mesh.shape[axis]))


def restore_own(state: TrainState, saved: Mapping[str, Sequence[Piece]]) -> None:
    """Fill what was a rank's own."""
    plan, mesh = state.params.plan, state.params.mesh
    one = next((name for name in saved if name.startswith("own ")), None)
    if one is None:
        return
    ways = int(one.partition("/")[0].rpartition(" of ")[2])
    axis = plan.reductions.owner.axis if plan.reductions.owner is not None else None
    for piece in needed_pieces(state):
        if _name(piece, 0, ways) not in saved:
            continue
        if axis is not None and mesh.shape[axis] == ways:
            fill(piece, saved[_name(piece, mesh.coords[axis], ways)])
            continue
        total = torch.zeros_like(piece.data, dtype=torch.float64)
        for rank in range(ways):
            theirs = piece._replace(data=torch.zeros_like(piece.data))
            fill(theirs, saved[_name(piece, rank, ways)])
            total += theirs.data
        piece.data.copy_(total / ways)


def _name(piece: Piece, rank: int, ways: int) -> str:
    return f"own {rank} of {ways}/{piece.name}"


def _own_trees(opt: Any) -> list[tuple[Any, ...]]:
    """The places in the optimizer's state of trees that are this rank's own."""
    found = []
    paths, nodes, _ = optree.tree_flatten_with_path(opt, is_leaf=lambda node: hasattr(node, "own_trees"))
    for path, node in zip(paths, nodes, strict=True):
        if hasattr(node, "own_trees"):
            found += [(*path, node._fields.index(field)) for field in node.own_trees()]
    return found

"""Rank-local tensors (see `shardlib.optim.base.StateMethods`), saved and restored.

On as many ranks as saved them, every rank gets back what it had. On any other number, all ranks get the mean of the saved
tensors, to which the optimizer brings them anyway when it next exchanges them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from shardlib.checkpoint.fragments import MASTERS, PARAMS, Fragment, bucket_fragments
from shardlib.checkpoint.packed import CheckpointTrees
from shardlib.tree import named_leaves, path_name

PREFIX = "rank_local/"


def diverged_axis(parts: CheckpointTrees) -> str | None:
    """The axis whose ranks do not have equal parameters now, or None."""
    owner = parts.params.plan.reductions.owner
    return owner.axis if owner is not None and _rank_local_trees(parts.opt) else None


def rank_local_fragments(parts: CheckpointTrees) -> Iterator[Fragment]:
    """Fragments of the parameters and of the trees of the optimizer's state that are rank-local now."""
    plan, mesh, axis = parts.params.plan, parts.params.mesh, diverged_axis(parts)
    if axis is None:
        return
    prefixes = (PARAMS, MASTERS, *(f"opt/{path_name(path)}/" for path in _rank_local_trees(parts.opt)))
    for bucket in plan.buckets:
        copies = [mesh.coords[other] for other in plan.copies(bucket) if other != axis]
        if plan.counts(bucket, mesh.coords) and not any(copies):
            for fragment in bucket_fragments(parts, bucket):
                if fragment.name.startswith(prefixes):
                    yield fragment._replace(name=_name(fragment.name, mesh.coords[axis], mesh.shape[axis]))


def ways_of(saved: Iterable[str]) -> int:
    """The number of ranks that have each saved tensors of their own; 0 if none has."""
    first = next((name for name in saved if name.startswith(PREFIX)), None)
    return int(first.removeprefix(PREFIX).partition("/")[0].rpartition(" of ")[2]) if first else 0


def sources(parts: CheckpointTrees, name: str, saved: Container[str], ways: int) -> tuple[tuple[str, float], ...]:
    """The saved tensors, with weights, whose sum fills fragments called ``name``; none if ranks held it in common.

    Args:
        ways: of `ways_of`.
    """
    if not ways or _name(name, 0, ways) not in saved:
        return ()
    mesh, owner = parts.params.mesh, parts.params.plan.reductions.owner
    if owner is not None and mesh.shape[owner.axis] == ways:
        return ((_name(name, mesh.coords[owner.axis], ways), 1.0),)
    return tuple((_name(name, rank, ways), 1 / ways) for rank in range(ways))


def _name(name: str, rank: int, ways: int) -> str:
    return f"{PREFIX}{rank} of {ways}/{name}"


def _rank_local_trees(opt: Any) -> list[tuple[Any, ...]]:
    """The paths in the optimizer's state of the trees that are rank-local now."""
    nodes = named_leaves(opt, lambda node: hasattr(node, "rank_local"))
    return [(*path, field) for path, node in nodes if hasattr(node, "rank_local") for field in node.rank_local()]

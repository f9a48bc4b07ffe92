"""The rows of a batch that are this rank's, and the ranks that have others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import MeshError, TreeError
from shardlib.execute.batches import batch_index
from shardlib.mesh.mesh import Mesh, as_mesh
from shardlib.optim.train_state import TrainState
from shardlib.sharded.tree import Sharded

# Axes whose use needs no plan to be known, being the defaults of transforms: whether the batch varies over them.
_KNOWN = {"data": True, "model": False, "pipe": False, "seq": False}


@dataclass(frozen=True)
class Share:
    """This rank's share of every batch: the ``index``-th of ``count`` equal runs of rows.

    Attributes:
        mesh: the mesh.
        axes: the axes over which the batch varies. Ranks that differ along other axes alone have the same rows.
        index: this rank's index among the ranks with different rows.
        count: the number of ranks with different rows.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    index: int
    count: int


def share_of(where: Any, over: Sequence[str] | None) -> Share:
    """The share of this rank, as the plan of sharded parameters or a state says, or by the names of a mesh's axes.

    Args:
        where: `Sharded` parameters, a `TrainState` or a mesh.
        over: the axes of a mesh over which the batch varies; by default "data", on a mesh of whose other axes the use is
            known by their names.

    Raises:
        TreeError: ``where`` is something else.
        MeshError: an axis that the mesh does not have, or a mesh with axes of unknown use.
    """
    params = where.params if isinstance(where, TrainState) else where
    if isinstance(params, Sharded):
        if over is not None:
            raise MeshError(
                f"loader: over={tuple(over)!r}, and the plan of the parameters says over which axes the batch varies "
                f"({', '.join(params.plan.batch_axes) or 'none'}): leave `over` out, or pass the mesh"
            )
        return Share(
            params.mesh, params.plan.batch_axes, batch_index(params.plan, params.mesh), params.plan.batch_ranks
        )
    if isinstance(params, (dict, list, tuple)):
        raise TreeError(
            f"loader: a plain {type(params).__name__} does not say which rows are this rank's: pass the mesh, the state, or "
            "the parameters that sl.shard returned"
        )
    mesh = as_mesh(params)
    axes = _axes_of(mesh) if over is None else tuple(over)
    index, count = 0, 1
    for axis in axes:
        size = mesh.group(axis).size  # refuses an axis that the mesh does not have
        index, count = index * size + mesh.coords[axis], count * size
    return Share(mesh, axes, index, count)


def _axes_of(mesh: Mesh) -> tuple[str, ...]:
    unknown = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in _KNOWN]
    if unknown:
        raise MeshError(
            f"loader: whether the batch varies over {', '.join(map(repr, unknown))} of {mesh} is for a plan to say: pass the "
            f"parameters that sl.shard returned, or name the axes: over={(*unknown, 'data')!r}, for example"
        )
    return tuple(axis for axis in mesh.shape if _KNOWN.get(axis))

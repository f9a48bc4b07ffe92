"""Rank-local buffers: those that differ between ranks, such as integer ones, which are not averaged. Each rank saves its own.

On a mesh of the same shape every rank gets back what it had. On another mesh they belong to no rank, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.checkpoint.manifest import Manifest
from shardlib.mesh.mesh import Mesh

PREFIX = "rank_local_buffers/"


def local_name(name: str, mesh: Mesh) -> str:
    """The name under which this rank saves its own ``name``, a buffer."""
    return f"{PREFIX}{mesh.rank} of {mesh.size}/{name}"


def on_its_mesh(held: Manifest, mesh: Mesh) -> bool:
    """Whether a mesh has the shape of the one that a checkpoint was saved on."""
    return _shape(held.mesh) == _shape(mesh.shape)


def of_no_rank(held: Manifest, mesh: Mesh) -> dict[str, str]:
    """Name -> why no rank of a mesh gets it, for the rank-local buffers of a checkpoint of another mesh."""
    if on_its_mesh(held, mesh):
        return {}
    names = {name.split("/", 2)[2] for name in held.tensors if name.startswith(PREFIX)}
    before, now = (", ".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in (held.mesh, mesh.shape))
    return {name: f"{name}: each rank of {before} saved its own, and this mesh is {now}" for name in sorted(names)}


def _shape(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in sizes.items() if size > 1]

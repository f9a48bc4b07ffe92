"""Attention whose sequence is cut over a mesh axis, by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

import torch

from shardlib.collectives.pairs import all_to_all, mesh_with
from shardlib.errors import SpecError
from shardlib.mesh.mesh import Mesh
from shardlib.nn.attention import Attention, plain_attention


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: str,
    how: Attention,
    *,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Attention of (batch, heads, sequence / ranks, size): each rank attends with its share of the heads.

    Payload per rank, forward: (P−1)/P of its q, k, v and output, which is 4(P−1)/P · N·h/P elements.

    Raises:
        SpecError: heads that do not divide over the axis.
    """
    mesh = mesh_with(mesh, axis)
    failures = [
        f"{x.shape[1]} {name} heads"
        for name, x in (("query", q), ("key and value", k))
        if x.shape[1] % mesh.shape[axis]
    ]
    if failures:
        raise SpecError(
            f"{' and '.join(failures)} do not divide over axis {axis!r} of size {mesh.shape[axis]} (sequence, "
            "kind='ulysses'): use a smaller axis, repeat the keys' heads, or use kind='ring', which cuts no heads"
        )
    q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2, mesh=mesh) for x in (q, k, v))
    return all_to_all(plain_attention(q, k, v, how), axis, split_dim=2, concat_dim=1, mesh=mesh)

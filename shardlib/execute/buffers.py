"""Buffers: tensors that a loss function takes and returns changed, such as BatchNorm's running statistics."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.collectives.primitives import sum_over
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, leaves_of, tree_map


@naming("the loss's buffers")
def average_buffers(buffers: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """Buffers after a step. Floating and complex ones are averaged over the batch axes, in one all-reduce per dtype and axis.

    Other buffers are this rank's.
    """
    if plan.batch_ranks == 1:
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, buffers)
    sums: dict[torch.dtype, torch.Tensor] = {}
    for dtype, leaves in _by_dtype(buffers).items():
        if dtype.is_floating_point or dtype.is_complex:
            sums[dtype] = torch.cat([leaf.reshape(-1) for leaf in leaves]).div_(plan.batch_ranks)
            reals = torch.view_as_real(sums[dtype]) if dtype.is_complex else sums[dtype]
            sum_over(mesh, plan.batch_axes, reals, scalars=False)
    averages = {
        dtype: iter(total.split([leaf.numel() for leaf in _by_dtype(buffers)[dtype]])) for dtype, total in sums.items()
    }

    def averaged(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return next(averages[leaf.dtype]).view(leaf.shape) if leaf.dtype in averages else leaf.detach()

    return tree_map(averaged, buffers)


def buffer_sizes(buffers: Tree) -> tuple[tuple[torch.dtype, int], ...]:
    """The dtypes of the buffers, each with its number of elements."""
    return tuple((dtype, sum(leaf.numel() for leaf in leaves)) for dtype, leaves in _by_dtype(buffers).items())


def _by_dtype(buffers: Tree) -> dict[torch.dtype, list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for leaf in leaves_of(buffers):
        if isinstance(leaf, torch.Tensor):
            groups.setdefault(leaf.dtype, []).append(leaf.detach())
    return groups

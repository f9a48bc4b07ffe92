"""Preparing a batch for a loss function: NumPy arrays become tensors, floats are cast, rows are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree
import torch
import torch.nn.functional as F

from shardlib.collectives import pairs, primitives
from shardlib.common._compat import transformed
from shardlib.common.alignment import aligned
from shardlib.errors import BatchError, LossError, listing
from shardlib.execute.meeting import meeting_in_backward
from shardlib.execute.uncut import uncut
from shardlib.mesh.mesh import Mesh, rank_of
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, adopt, flatten, tree_map, unflatten


def as_tensors(tree: Tree, device: torch.device) -> Tree:
    """Convert a pytree's NumPy arrays to tensors on ``device`` and NumPy scalars to Python numbers; keep other leaves.

    On a CPU a tensor shares a writable array's memory. Arrays of dtypes without a torch counterpart (strings, objects,
    dates) stay arrays. Sharded trees and states get a form without leaves.
    """
    adopt(tree)

    def converted(leaf: Any) -> Any:
        if _is_state(leaf):
            return leaf.for_batch()
        if isinstance(leaf, np.generic) and not isinstance(leaf, (str, bytes)):
            return leaf.item()
        if not isinstance(leaf, np.ndarray):
            return leaf
        native = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("="), copy=False)).reshape(leaf.shape)
        try:
            return torch.from_numpy(native if native.flags.writeable else native.copy()).to(device)
        except TypeError:
            return leaf

    return optree.tree_map(converted, tree, is_leaf=_is_state)


def _is_state(value: Any) -> bool:
    return hasattr(value, "for_batch")  # a train state's class is of a room on this floor


def cast(leaf: Any, plan: Plan) -> Any:
    """Cast a leaf of a batch to the plan's dtype for batches, if it is a floating tensor."""
    if plan.step.cast_batch is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.to(plan.step.cast_batch)
    return leaf


def arriving(batch: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """A whole batch, converted and cast, as a function is given it."""
    return tree_map(lambda leaf: cast(leaf, plan), as_tensors(batch, mesh.device))


def split_batch(batch: Tree, plan: Plan, mesh: Mesh) -> list[Tree]:
    """Cut a batch from `as_tensors` into micro-batches: tensors along dimension 0, with floats cast.

    Where sums must not depend on the mesh, neither may the place of a micro-batch in memory: each begins an allocation.
    Numbers, strings and tensors without dimensions are given to every micro-batch unchanged.

    Raises:
        BatchError: a leaf on another device, or one that cannot be cut into rows; lists all.
    """
    paths, leaves, treedef = flatten(batch)
    tensors = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    n = plan.step.microbatches
    failures = [
        f"{path or 'batch'}: on {leaf.device}, the mesh is on {mesh.device}; move it with .to({str(mesh.device)!r})"
        for path, leaf in tensors
        if leaf.device != mesh.device
    ]
    failures += [
        f"{path or 'batch'}: dimension 0 of shape {tuple(leaf.shape)} does not divide into {n} micro-batches"
        for path, leaf in tensors
        if leaf.dim() and (0 < leaf.shape[0] < n if plan.stages.uneven and not plan.step.tree else leaf.shape[0] % n)
    ]
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch does not fit the plan:\n{listing(failures)}\nUse a batch per rank whose size is a "
            f"multiple of {n}, the number of micro-batches, on the mesh's device. sl.data.loader(..., drop_last=True) leaves "
            "out the last batch of its epochs if that has fewer rows."
        )
    if n > 1:
        _require_rows(batch, tensors, n, mesh)

    def parts(leaf: Any) -> Sequence[Any]:
        leaf = cast(leaf, plan)
        if isinstance(leaf, torch.Tensor) and not transformed():
            leaf = leaf.detach()  # so that x.requires_grad_() in a loss does not mark the caller's tensor
        cut = isinstance(leaf, torch.Tensor) and leaf.dim() and n > 1
        cuts = leaf.tensor_split(n) if cut else [leaf] * n
        return [aligned(part) for part in cuts] if plan.step.tree and isinstance(leaf, torch.Tensor) else cuts

    columns = [parts(leaf) for leaf in leaves]
    return [unflatten(treedef, [column[index] for column in columns]) for index in range(n)]


def rows_of(batch: Tree) -> int:
    """The number of rows of a batch: dimension 0 of its first tensor with dimensions, or 1 without any."""
    return next((leaf.shape[0] for leaf in flatten(batch)[1] if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def empty_leaves(batch: Tree) -> str:
    """The names and shapes of a batch's tensors with dimensions, if none of them has a row; else "".

    >>> empty_leaves({"x": torch.ones(0, 4), "scale": torch.ones(())}), empty_leaves({"x": torch.ones(1, 0)})
    ('x (0, 4)', '')
    """
    paths, leaves, _ = flatten(batch)
    tensors = [
        (p, leaf) for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if any(len(leaf) for _, leaf in tensors):
        return ""
    return ", ".join(f"{path or 'batch'} {tuple(leaf.shape)}" for path, leaf in tensors)


def batch_index(plan: Plan, mesh: Mesh) -> int:
    """This rank's index among the ranks that have different shares of the batch."""
    return rank_of({axis: mesh.shape[axis] for axis in plan.batch_axes}, mesh.coords)


def _require_rows(batch: Tree, tensors: list[tuple[str, torch.Tensor]], n: int, mesh: Mesh) -> None:
    """Refuse tensors with other than the batch's number of rows, and leaves with rows that would not be cut."""
    rows = rows_of(batch)
    failures = [
        f"{path or 'batch'}: {leaf.shape[0]} rows (shape {tuple(leaf.shape)}) in a batch of {rows} rows; give it {rows}, or "
        "close over it in the loss function if its dimension 0 is not rows"
        for path, leaf in tensors
        if leaf.dim() and leaf.shape[0] != rows
    ]
    failures += [
        f"{path or 'batch'}: layout {leaf.layout}, which cannot be cut; call .to_dense()"
        for path, leaf in tensors
        if leaf.dim() and leaf.layout is not torch.strided
    ]
    failures += uncut(batch, rows if any(leaf.dim() for _, leaf in tensors) else 0)
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch cannot be cut into {n} micro-batches, row by row:\n{listing(failures)}"
        )


# The rows of all ranks that have different shares of the batch, for losses that compare rows with each other.


class WholeBatch:
    """The rows of all ranks, as `shardlib.nn.gather_batch` takes them.

    Args:
        trained: whether micro-batches are those of a step.
        meet: brings the ranks together before an exchange; see `Meeting`.

    Attributes:
        axes: axes over which the batch varies, major to minor.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, meet: Callable[[], None]) -> None:
        self.axes = plan.batch_axes
        self._mesh, self._meet = mesh, meet
        self._microbatches = (plan.step.total_microbatches or plan.step.microbatches) if trained else 1

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self._microbatches > 1:
            raise LossError(
                f"gather_batch in a plan with {self._microbatches} micro-batches, each of which would be compared with its "
                "own rows alone. Leave out accumulate() (pipeline(), reproducible()), and encode the rows in tiles, which "
                "takes as little memory: sl.nn.tiled(encode, rows, n, dim=0)"
            )
        axes = [axis for axis in reversed(self.axes) if self._mesh.shape[axis] > 1]
        if not axes:
            return x
        self._meet()
        dim %= x.dim()
        for axis in axes:
            x = self._along(axis, x, dim)
        return meeting_in_backward(x, self._meet)

    def _along(self, axis: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        ranks, rows = self._mesh.shape[axis], x.shape[dim]
        counts = [rows] * ranks
        if not self._mesh.abstract:
            of_ranks = torch.empty(ranks, dtype=torch.int64, device=x.device)
            own = torch.full((1,), rows, device=x.device)
            with self._mesh.traffic.by_the_loss(), naming("the numbers of rows that ranks gather"):
                primitives.all_gather(self._mesh, axis, of_ranks, own, scalars=True).wait()
            counts = of_ranks.tolist()
        most = max(counts)
        padded = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, most - rows)) if rows < most else x
        whole = pairs.all_gather(padded, axis, dim=dim, mesh=self._mesh)
        if min(counts) == most:
            return whole
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(whole.chunk(ranks, dim), counts)], dim)

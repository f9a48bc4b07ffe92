"""A batch on its way into a loss function: NumPy's arrays become tensors, floats are cast, rows go to micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import optree
import torch

from shardlib.errors import BatchError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, flatten, path_name, tree_map, unflatten


def as_tensors(tree: Tree, device: torch.device) -> Tree:
    """NumPy's arrays in a pytree as tensors on ``device``, its numbers as Python's; other leaves as they are.

    On a CPU a tensor shares the array's memory, where that can be written to. Arrays of what no tensor holds (strings,
    objects, dates) stay arrays.
    """

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, np.generic) and not isinstance(leaf, (str, bytes)):
            return leaf.item()
        if not isinstance(leaf, np.ndarray):
            return leaf
        native = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("="), copy=False)).reshape(leaf.shape)
        try:
            return torch.from_numpy(native if native.flags.writeable else native.copy()).to(device)
        except TypeError:
            return leaf

    return tree_map(converted, tree)


def cast(leaf: Any, plan: Plan) -> Any:
    """A leaf of a batch as the loss sees it: floats in the dtype that the plan says."""
    if plan.step.cast_batch is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.to(plan.step.cast_batch)
    return leaf


def arriving(batch: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """A whole batch as a function sees it."""
    return tree_map(lambda leaf: cast(leaf, plan), as_tensors(batch, mesh.device))


def split_batch(batch: Tree, plan: Plan, mesh: Mesh) -> list[Tree]:
    """Micro-batches of what `as_tensors` gave: every tensor with dimensions cut along dimension 0; floats cast.

    Numbers, strings and tensors without dimensions go to every micro-batch as they are.

    Raises:
        BatchError: a leaf on another device, or that cannot be cut into rows; lists all.
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
        if leaf.dim() and (0 < leaf.shape[0] < n if plan.stages.uneven else leaf.shape[0] % n)
    ]
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch does not fit the plan:\n{listing(failures)}\nUse a batch per rank whose size is a "
            f"multiple of {n}, the number of micro-batches, on the mesh's device."
        )
    if n > 1:
        _require_rows(batch, tensors, n, mesh)

    def part(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = cast(leaf, plan)
        return leaf.tensor_split(n)[index] if leaf.dim() and n > 1 else leaf

    return [unflatten(treedef, [part(leaf, index) for leaf in leaves]) for index in range(n)]


def rows_of(batch: Tree) -> int:
    """Dimension 0 of a batch: that of its first tensor with dimensions."""
    return next((leaf.shape[0] for leaf in flatten(batch)[1] if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def batch_index(plan: Plan, mesh: Mesh) -> int:
    """This rank's number among the ranks that share the batch."""
    index = 0
    for axis in plan.batch_axes:
        index = index * mesh.shape[axis] + mesh.coords[axis]
    return index


def _require_rows(batch: Tree, tensors: list[tuple[str, torch.Tensor]], n: int, mesh: Mesh) -> None:
    """Refuse what would be cut where it has no rows, or would not be cut though it has."""
    rows = rows_of(batch)
    failures = [
        f"{path or 'batch'}: {leaf.shape[0]} rows (shape {tuple(leaf.shape)}) beside {rows}; give it as many, or close over "
        "it in the loss function if it has none"
        for path, leaf in tensors
        if leaf.dim() and leaf.shape[0] != rows
    ]
    failures += [
        f"{path or 'batch'}: layout {leaf.layout}, which cannot be cut; call .to_dense()"
        for path, leaf in tensors
        if leaf.dim() and leaf.layout is not torch.strided
    ]
    accessors, leaves, _ = optree.tree_flatten_with_path(batch, is_leaf=_is_plain_list)
    for path, leaf in zip(accessors, leaves, strict=True):
        if _is_plain_list(leaf):
            if len(leaf) == rows:
                failures.append(
                    f"{_named(path)}: a {type(leaf).__name__} with {type(leaf[0]).__name__} for each of {rows} rows; make it "
                    "a tensor, leave it out, or close over it in the loss function if it does not belong to rows"
                )
        elif isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == rows:
            failures.append(
                f"{_named(path)}: a NumPy array of {leaf.dtype}, which no tensor holds, with {rows} rows; leave it out, or "
                "close over it in the loss function if it does not belong to rows"
            )
        elif _hides_tensors(leaf):
            failures.append(
                f"{_named(path)}: {type(leaf).__name__} is no pytree, so the tensors in it cannot be cut; pass "
                f"{'dict(...)' if isinstance(leaf, Mapping) else 'vars(...)'} of it"
            )
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch cannot be cut into {n} micro-batches, row by row:\n{listing(failures)}"
        )


def _is_plain_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 1 and all(isinstance(v, (Real, str, bytes)) for v in value)


def _hides_tensors(leaf: Any) -> bool:
    """Whether an object that is no pytree holds tensors or arrays."""
    if isinstance(leaf, (torch.Tensor, np.ndarray, type)):
        return False
    held = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    return any(isinstance(value, (torch.Tensor, np.ndarray)) for value in held.values())


def _named(path: tuple[Any, ...]) -> str:
    return path_name(path) or "batch"

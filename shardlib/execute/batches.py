"""Preparing a batch for a loss function: NumPy arrays become tensors, floats are cast, rows are cut into micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from shardlib.common._compat import transformed, version_of
from shardlib.common.hidden import TENSORS, held, hides
from shardlib.common.tensors import aligned
from shardlib.errors import BatchError, listing
from shardlib.mesh.mesh import Mesh, rank_of
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, adopt, flatten, leaves_of, path_name, tree_map, unflatten


class Microbatches(NamedTuple):
    """A batch that is cut into micro-batches already, for a plan with as many (`shardlib.accumulate`). They may have other
    numbers of rows and other shapes each, such as sentences that are padded to the longest of their micro-batch; a loss that
    is a `Mean` weighs them.

    Args:
        parts: a batch each, as the loss function takes it.

    >>> params = sl.shard({"w": torch.ones(2)}, sl.make_mesh(), sl.accumulate(2))
    >>> loss = lambda params, x: sl.Mean((x @ params["w"]).sum(), len(x))
    >>> state, step = sl.make_train_step(loss, params, sl.optim.sgd(0.1))
    >>> state, metrics = step(state, sl.Microbatches((torch.ones(3, 2), torch.zeros(1, 2))))
    >>> float(metrics["loss"])
    1.5
    """

    parts: Sequence[Tree]


# Leaves of a batch that belong to its rows and are not cut with them: lists by row, arrays of objects, hidden tensors.


def uncut(batch: Tree, rows: int) -> list[str]:
    """What is to be said of each of these leaves, with a remedy.

    >>> print(*uncut({"x": torch.ones(2, 3), "words": [["a"], ["b", "c"]], "size": (3,)}, 2))
    words: a list with list for each of 2 rows; make it a tensor, leave it out, or close over it in the loss function if it \
does not belong to rows
    """
    failures = []
    paths, leaves, _ = optree.tree_flatten_with_path(batch, is_leaf=lambda value: by_row(value, rows))
    for path, leaf in zip(paths, leaves, strict=True):
        name = path_name(path) or "batch"
        if isinstance(leaf, np.ndarray):
            if leaf.ndim and len(leaf) == rows:
                failures.append(
                    f"{name}: a NumPy array of {leaf.dtype} with {rows} rows, which no tensor holds; leave it out, or "
                    "close over it in the loss function if it does not belong to rows"
                )
        elif by_row(leaf, rows):
            entry = type(leaf[0]).__name__ if isinstance(leaf, (list, tuple, deque)) else "an entry"
            failures.append(
                f"{name}: a {type(leaf).__name__} with {entry} for each of {rows} rows; make it "
                "a tensor, leave it out, or close over it in the loss function if it does not belong to rows"
            )
        elif hides(leaf) or (_is_record(leaf) and any(by_row(value, rows) for value in held(leaf))):
            failures.append(_hidden(name, leaf))
    return failures


def by_row(value: Any, rows: int) -> bool:
    """Whether a value is a list, or like one, with an entry for each row, of which nothing is cut."""
    if rows == 0:
        return False
    if type(value) in (list, tuple, deque):
        if len(value) != rows:
            return False
        leaves = leaves_of(list(value))
        return bool(leaves) and not any(isinstance(leaf, TENSORS) and leaf.ndim for leaf in leaves)
    if isinstance(value, (str, bytes, tuple, type, Mapping, *TENSORS)):
        return False
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        return False
    return optree.tree_is_leaf(value) and len(value) == rows


def _is_record(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) or is_dataclass(leaf)


def hidden_in(batch: Tree) -> list[str]:
    """What is to be said of the leaves that hide tensors, with a remedy."""
    paths, leaves, _ = flatten(batch)
    return [_hidden(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if hides(leaf)]


def _hidden(path: str, leaf: Any) -> str:
    if isinstance(leaf, Mapping):
        remedy = "pass dict(...) of it"
    elif any(isinstance(value, TENSORS) for value in getattr(leaf, "__dict__", {}).values()):
        remedy = "pass vars(...) of it"
    else:
        remedy = "pass a dict of the tensors in it"
    return f"{path or 'batch'}: {type(leaf).__name__} is not a pytree, so what is in it cannot be cut; {remedy}"


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
    """Cut a batch from `as_tensors` into micro-batches: tensors along dimension 0, with floats cast. `Microbatches` are cut.

    Where sums must not depend on the mesh, neither may the place of a micro-batch in memory: each begins an allocation.
    Numbers, strings and tensors without dimensions are given to every micro-batch unchanged.

    Raises:
        BatchError: a leaf on another device, or one that cannot be cut into rows; lists all. Another number of
            `Microbatches` than the plan's, or other shapes in a pipeline.
    """
    n, is_cut = plan.step.microbatches, isinstance(batch, Microbatches)
    if is_cut:
        _require_parts(batch.parts, plan)
    paths, leaves, treedef = flatten(batch)
    tensors = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    failures = [
        f"{path or 'batch'}: on {leaf.device}, the mesh is on {mesh.device}; move it with .to({str(mesh.device)!r})"
        for path, leaf in tensors
        if leaf.device != mesh.device
    ]
    failures += [
        f"{path or 'batch'}: dimension 0 of shape {tuple(leaf.shape)} does not divide into {n} micro-batches"
        for path, leaf in ([] if is_cut else tensors)
        if leaf.dim() and (0 < leaf.shape[0] < n if plan.stages.uneven and not plan.step.tree else leaf.shape[0] % n)
    ]
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch does not fit the plan:\n{listing(failures)}\nGive a multiple of {n} rows "
            "(sl.data.loader: drop_last=True)"
        )
    if n > 1 and not is_cut:
        _require_rows(batch, tensors, n, mesh)

    def own(leaf: Any) -> Any:
        leaf = cast(leaf, plan)
        # Detached, so that x.requires_grad_() in a loss does not mark the caller's tensor.
        return leaf.detach() if isinstance(leaf, torch.Tensor) and not transformed() else leaf

    if is_cut:
        place = aligned if plan.step.tree else lambda leaf: leaf
        return [
            tree_map(lambda leaf: place(own(leaf)) if isinstance(leaf, torch.Tensor) else leaf, p) for p in batch.parts
        ]

    def parts(leaf: Any) -> Sequence[Any]:
        leaf = own(leaf)
        cut = isinstance(leaf, torch.Tensor) and leaf.dim() and n > 1
        cuts = leaf.tensor_split(n) if cut else [leaf] * n
        return [aligned(part) for part in cuts] if plan.step.tree and isinstance(leaf, torch.Tensor) else cuts

    columns = [parts(leaf) for leaf in leaves]
    return [unflatten(treedef, [column[index] for column in columns]) for index in range(n)]


def _require_parts(parts: Sequence[Tree], plan: Plan) -> None:
    n = plan.step.microbatches
    if len(parts) != n:
        raise BatchError(
            f"{len(parts)} micro-batches for a plan with {n}: give {n}, or use sl.accumulate({len(parts)})"
        )
    shapes = {
        tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves_of(part)) for part in parts
    }
    if plan.stages.axes and len(shapes) > 1:
        raise BatchError("micro-batches of a pipeline have one shape: pad them to the longest of the batch")


def own_containers(batch: Tree) -> Tree:
    """A batch in containers of its own, for one call of a function: what the call takes out of them (``batch.pop("labels")``)
    or puts into them is not there in another call, as a step may be computed twice."""
    return tree_map(lambda leaf: leaf, batch)


def writes_to(batch: Tree) -> dict[str, int]:
    """Path -> how often a tensor's memory was written to, for the tensors of a batch that count writes."""
    return {
        path or "batch": version_of(leaf)
        for path, leaf in zip(*flatten(batch)[:2], strict=True)
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    }


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

"""What goes into a loss function and what comes out: batches, micro-batches, means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch

from shardlib.errors import REENTRANT, BatchError, LossError, listing
from shardlib.functional import Mean
from shardlib.mesh import Mesh
from shardlib.plan import Plan
from shardlib.tree import Tree, flatten, unflatten


class Outcome(NamedTuple):
    """What one call of a loss function gave: ``weighted`` tells a `Mean` from a plain scalar."""

    total: torch.Tensor
    weight: torch.Tensor
    weighted: bool
    aux: Any
    buffers: Any


def wants(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter of this name."""
    return _parameter(fn, name) is not None


def needs(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter of this name without a default."""
    parameter = _parameter(fn, name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _parameter(fn: Callable[..., Any], name: str) -> inspect.Parameter | None:
    try:
        return inspect.signature(fn).parameters.get(name)
    except (TypeError, ValueError):
        return None


def is_compiled(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is what torch.compile returned."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def read_loss(value: Any, with_buffers: bool) -> Outcome:
    """Take apart ``loss``, ``(loss, aux)``, ``(loss, buffers)`` or ``((loss, aux), buffers)``.

    Raises:
        LossError: not a scalar, or not of this form.
    """
    buffers = None
    if with_buffers:
        if not _is_pair(value):
            raise LossError(f"a loss function with buffers returns (loss, buffers) and gave {_told(value)}")
        value, buffers = value
    aux = None
    if _is_pair(value):
        value, aux = value
    total, weight = value if isinstance(value, Mean) else (value, None)
    for name, part in (("total", total), ("weight", weight)) if isinstance(value, Mean) else (("loss", total),):
        if name == "weight" and isinstance(part, (int, float)):
            continue
        if not isinstance(part, torch.Tensor) or part.numel() != 1:
            raise LossError(
                f"the {name} of the loss must be a scalar tensor and is {_told(part)}; reduce it with .mean(), or return "
                "sl.Mean(total, weight), or (loss, aux) to hand out more"
            )
    if total.is_complex():
        raise LossError(
            "the loss is complex, and only real ones can be made small; take .real, .abs() or .abs().square() of it"
        )
    if weight is None:
        weight_tensor = torch.ones((), device=total.device)
    else:
        weight_tensor = torch.as_tensor(weight, device=total.device).detach().reshape(())
    return Outcome(total.reshape(()), weight_tensor, weight is not None, aux, buffers)


def require_gradient(total: torch.Tensor) -> None:
    if not total.requires_grad:
        raise LossError(
            "the loss does not depend on any trained parameter, so it has no gradient; check for .detach(), .item() or "
            "torch.no_grad() in the loss function, and for freeze() that matches everything"
        )


def refuse_reentrant_checkpoints(total: torch.Tensor) -> None:
    """Raise where backward would run a backward of its own: gradients of parameters in there would be lost."""
    seen, todo = set(), [total.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise LossError(f"the loss {REENTRANT}")
        todo += [previous for previous, _ in node.next_functions]


def cast(leaf: Any, plan: Plan) -> Any:
    """A leaf of a batch as the loss sees it: floats in the dtype that the plan says."""
    if plan.cast_batch is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.to(plan.cast_batch)
    return leaf


def split_batch(batch: Tree, plan: Plan, mesh: Mesh) -> list[Tree]:
    """Micro-batches: every tensor with dimensions cut along dimension 0; floats cast as the plan says.

    Raises:
        BatchError: a leaf on another device, or whose dimension 0 does not divide; lists all.
    """
    paths, leaves, treedef = flatten(batch)
    tensors = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    n = plan.microbatches
    failures = [
        f"{path or 'batch'}: on {leaf.device}, the mesh is on {mesh.device}; move it with .to({str(mesh.device)!r})"
        for path, leaf in tensors
        if leaf.device != mesh.device
    ]
    failures += [
        f"{path or 'batch'}: dimension 0 of shape {tuple(leaf.shape)} does not divide into {n} micro-batches"
        for path, leaf in tensors
        if leaf.dim() and (leaf.shape[0] % n if plan.pipeline is None else leaf.shape[0] < n)
    ]
    if failures:
        raise BatchError(
            f"rank {mesh.rank}'s batch does not fit the plan:\n{listing(failures)}\nUse a batch per rank whose size is a "
            f"multiple of {n}, the number of micro-batches, on the mesh's device."
        )

    def part(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = cast(leaf, plan)
        return leaf.tensor_split(n)[index] if leaf.dim() and n > 1 else leaf

    return [unflatten(treedef, [part(leaf, index) for leaf in leaves]) for index in range(n)]


def is_mean(value: Any) -> bool:
    return isinstance(value, Mean)


def map_means(fn: Callable[[Mean], Any], tree: Tree) -> Tree:
    """``fn`` applied to every `Mean` of a pytree; other leaves stay."""
    return optree.tree_map(lambda leaf: fn(leaf) if is_mean(leaf) else leaf, tree, is_leaf=is_mean)


def as_number(value: Any) -> torch.Tensor:
    """A total or a weight of a `Mean`, detached, float64."""
    if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
        raise LossError("a sl.Mean is of real numbers, and this one of complex ones; give .real and .imag a Mean each")
    return torch.as_tensor(value, dtype=torch.float64).detach()


def add_means(total: Tree, part: Tree) -> Tree:
    """Two results of one function: sums and weights added up, detached; other leaves are ``part``'s. None: no first one."""

    part = map_means(lambda mean: Mean(*map(as_number, mean)), part)
    if total is None:
        return part
    before = iter(means_of(total))
    return map_means(lambda mean: Mean(*(a + b for a, b in zip(next(before), mean))), part)


def means_of(tree: Tree) -> list[Mean]:
    return [leaf for leaf in optree.tree_leaves(tree, is_leaf=is_mean) if is_mean(leaf)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and not isinstance(value, Mean)


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"

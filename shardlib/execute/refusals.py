"""Uses of parameters, and results, that are not supported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.common.hidden import hides
from shardlib.common.writes import written
from shardlib.errors import HandleError, LossError, listing
from shardlib.execute.handles import FLAGS, Handle
from shardlib.execute.units import BucketState, UnitState
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, adopt, flatten, tree_map

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Torch's words for operands whose dtypes differ.
_MIXED = re.compile(r"mixed dtype|self\.dtype|type.*(bfloat16|float16|half)|(bfloat16|half).*type", re.IGNORECASE)


def require_unwritten(states: Sequence[BucketState], gathers: bool, error: Exception | None = None) -> None:
    """Refuse functions that have written to parameters in place.

    Args:
        gathers: whether units are gathered, so that the stored parameters are as they were.
        error: what the function raised, if anything.

    Raises:
        HandleError: names the parameters.
    """
    for state in states:
        state.note_writes()
    paths = [path for state in states if state.written for path in state.bucket.paths]
    if paths and not isinstance(error, HandleError):
        refused = written("the function", *paths)
        if not gathers:
            refused.args = (f"{refused}. This state holds what was written: go on from another",)
        raise refused from error


def refuse_autocast(unit: UnitState, plan: Plan, device: torch.device) -> None:
    """Refuse to gather a unit under autocast that the function has turned on itself, if it would copy whole parameters."""
    if plan.step.autocast is None and torch.is_autocast_enabled(device.type):
        buckets = [state.bucket for state in unit.buckets if state.bucket.dtype == torch.float32]
        if any(len(shape) > 1 for bucket in buckets for shape in bucket.shapes):
            name = _NAMES[torch.get_autocast_dtype(device.type)]
            raise HandleError(
                f"torch.autocast is on while unit {unit.label!r} is gathered in fp32. Use sl.precision({name!r}, "
                "autocast=True)"
            )


def explain(error: Exception, plan: Plan, holds: bool) -> HandleError | None:
    """What to do about an error of torch's; None for others. ``holds`` as in `shardlib.execute.collective_order.Record`."""
    if "requires_grad flags of leaf" in str(error):
        return HandleError(f"requires_grad of a parameter, or of what is computed with one, is set {FLAGS}")
    return _explain_dtypes(error, plan) or (_explain_hooks(error) if holds else None)


def _explain_dtypes(error: Exception, plan: Plan) -> HandleError | None:
    """What to do about an operation of torch's that is given 16-bit parameters and other numbers; None for other errors."""
    held = {bucket.dtype for bucket in plan.buckets} & set(_NAMES)
    text = str(error).partition("\n")[0]
    if type(error) not in (RuntimeError, ValueError) or not held or not _MIXED.search(text):
        return None
    name = _NAMES[held.pop()]
    if plan.step.autocast is None:
        remedy = f"Take sl.precision({name!r}, autocast=True), or"
    else:
        remedy = "Autocast does not cast this operation:"
    return HandleError(
        f"{text}: parameters are in {name}, and an operand (mask, positions) is not. {remedy} leave the layer's in "
        "their dtype, keep='*/layer/*'"
    )


def _explain_hooks(error: Exception) -> HandleError | None:
    """What ``torch.func`` means by its refusal to start where tensors are saved through hooks; None for other errors."""
    if not refused_for_hooks(error):
        return None
    return HandleError(
        "torch.func is called in a recomputed block (sl.remat, torch.utils.checkpoint). Call it outside, or do not "
        "recompute"
    )


def refused_for_hooks(error: Exception) -> bool:
    """Whether ``torch.func`` has refused to start, where tensors are saved through hooks."""
    return "saved tensor hooks" in str(error)


# Results must be pytrees: tensors that an object hides cannot be detached, copied, gathered, averaged or sent.


def outside(tree: Tree, what: str, in_parameters: Callable[[torch.Tensor], bool]) -> Tree:
    """The results of a function, detached, with values that later steps do not change.

    Tensors in the memory of parameters are copied, since the optimizer writes to that memory or it is released. Handles are
    gathered, on every rank; handles of slices, and objects that hide tensors, are refused.

    Args:
        what: the results' name, for messages.
        in_parameters: tells whether a tensor lies in the memory of parameters.
    """
    require_open(tree, what)

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with torch.no_grad():
            if isinstance(leaf, Handle):
                return leaf.clone()
            leaf = leaf.detach()
            if leaf.layout is not torch.strided:
                return leaf
            return leaf.clone() if in_parameters(leaf) else leaf

    return tree_map(kept, tree)


def storages_of(params: Sharded) -> frozenset[int]:
    """The identities of the storages in which this rank's parameters are stored, but for those on disk."""
    return frozenset(storage_id(buffer.untyped_storage()) for buffer in params.in_memory.values())


def require_open(tree: Tree, what: str) -> None:
    """Refuse objects in a result that hide tensors or a `Mean`; classes that torch's pytrees know become pytrees.

    Args:
        what: the result's name, for the message.

    Raises:
        LossError: lists all of them, by path and class.
    """
    adopt(tree)
    paths, leaves, _ = flatten(tree)
    hidden = [
        f"{path or what}: {type(leaf).__name__}{'; dict(...) of it is one' if isinstance(leaf, Mapping) else ''}"
        for path, leaf in zip(paths, leaves, strict=True)
        if hides(leaf, (torch.Tensor, Mean))
    ]
    if hidden:
        raise LossError(
            f"{what}: these hold tensors, or sl.Mean, and are not pytrees:\n{listing(hidden)}\nReturn a dict or "
            "tuple, or register the class (optree.register_pytree_node)"
        )

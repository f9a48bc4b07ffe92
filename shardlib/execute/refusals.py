"""Uses of parameters inside a user's function that are not supported."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from shardlib.common.writes import written
from shardlib.errors import HandleError
from shardlib.execute.units import BucketState, UnitState
from shardlib.plan.plan import Plan

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
                f"torch.autocast is on while unit {unit.label!r} is gathered in fp32 (ZeRO stage 3): its copies of whole "
                f"parameters would stay until backward. Put sl.precision({name!r}, autocast=True) in the plan instead, which "
                "gathers in 16 bits what autocast casts"
            )


def explain(error: Exception, plan: Plan, holds: bool) -> HandleError | None:
    """What to do about an error of torch's; None for others. ``holds`` as in `shardlib.execute.record.Record`."""
    return _explain_dtypes(error, plan) or (_explain_hooks(error) if holds else None)


def _explain_dtypes(error: Exception, plan: Plan) -> HandleError | None:
    """What to do about an operation of torch's that is given 16-bit parameters and other numbers; None for other errors."""
    held = {bucket.dtype for bucket in plan.buckets} & set(_NAMES)
    text = str(error).partition("\n")[0]
    if type(error) not in (RuntimeError, ValueError) or not held or not _MIXED.search(text):
        return None
    name = _NAMES[held.pop()]
    if plan.step.autocast is None:
        remedy = (
            f"Take sl.precision({name!r}, autocast=True), under which torch casts the operands of such operations; or"
        )
    else:
        remedy = "Autocast casts nothing for this operation:"
    return HandleError(
        f"{text}: the function makes numbers of another dtype than its parameters, which sl.precision holds in {name} "
        f"(masks, positions and norms' statistics are in fp32, for example). {remedy} leave the layer's parameters in their "
        "own dtype, keep='*/layer/*'"
    )


def _explain_hooks(error: Exception) -> HandleError | None:
    """What ``torch.func`` means by its refusal to start where tensors are saved through hooks; None for other errors."""
    if not refused_for_hooks(error):
        return None
    return HandleError(
        "torch.func is called in a block that is recomputed (sl.remat, torch.utils.checkpoint), whose hooks on saved tensors "
        "its transforms do not allow. Call it outside of such blocks, or recompute none (leave out sl.remat)"
    )


def refused_for_hooks(error: Exception) -> bool:
    """Whether ``torch.func`` has refused to start, where tensors are saved through hooks."""
    return "saved tensor hooks" in str(error)

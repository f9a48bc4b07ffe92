"""Uses of parameters inside a user's function that are not supported."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.common._compat import func_transform
from shardlib.common.writes import written
from shardlib.errors import HandleError
from shardlib.execute.units import BucketState


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


def refuse_func(unit: str) -> None:
    """Refuse to gather a unit inside a transform of ``torch.func``."""
    if func_transform() is not None:
        raise HandleError(
            f"torch.func inside the loss reaches unit {unit!r}, whose parameters are gathered on use (ZeRO stage "
            "3), and its transforms cannot cross the gather. Use zero(stage=2), or take the parameters first: "
            "w = p.clone() outside the torch.func call"
        )


def refuse_autocast(unit: str, device: torch.device) -> None:
    """Refuse to gather a unit under autocast."""
    if torch.is_autocast_enabled(device.type):
        raise HandleError(
            f"autocast is on while unit {unit!r} is gathered (ZeRO stage 3); its casts would keep whole parameters "
            "alive. Use sl.precision('bf16') in the plan instead, with keep=[...] for what must stay in fp32"
        )


def explain_hooks(error: Exception) -> HandleError | None:
    """What ``torch.func`` means by its refusal to start where tensors are saved through hooks; None for other errors."""
    if "saved tensor hooks" not in str(error):
        return None
    return HandleError(
        "torch.func inside the loss differentiates while parameters are gathered on use (ZeRO stage 3), which "
        "its transforms do not support. Use torch.autograd.grad there, or zero(stage=2)"
    )

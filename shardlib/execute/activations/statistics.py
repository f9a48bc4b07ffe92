"""Running statistics in a block that backward computes again: they are those of one pass.

Operators of batch_norm write to them without a sign that autograd could see; the first run of a function shows whether it
has any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardlib.common.writes import STATISTICS


def updated_once(fn: Callable[..., Any], updates: Collection[str]) -> Callable[..., Any]:
    """``fn``, whose calls after the first one leave running statistics as they are.

    Args:
        updates: the operators by which the function around it updates them. Without any, no mode is entered, in which
            compiled functions would be compiled once more.
    """
    called = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called and updates:
            with _Unchanged():
                return fn(*args, **kwargs)
        called = True
        return fn(*args, **kwargs)

    return run


class _Unchanged(TorchFunctionMode):
    """A mode in which copies of running statistics are updated. Where they are, their values make no difference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ARGUMENTS:
            given = dict(zip(_ARGUMENTS[func], args)) | kwargs
            if given.get("training", given.get("use_input_stats", func is F.instance_norm)):
                given |= {name: given[name].clone() for name in STATISTICS if given.get(name) is not None}
            return func(**given)
        return func(*args, **kwargs)


_AFFINE = "weight", "bias"
_ARGUMENTS = {
    F.batch_norm: ("input", *STATISTICS, *_AFFINE, "training", "momentum", "eps"),
    F.instance_norm: ("input", *STATISTICS, *_AFFINE, "use_input_stats", "momentum", "eps"),
    torch.batch_norm: ("input", *_AFFINE, *STATISTICS, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: ("input", *_AFFINE, *STATISTICS, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}

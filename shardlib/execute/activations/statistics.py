"""Running statistics in a block that backward computes again: they are those of one pass.

Operators of batch_norm write to them without a sign that autograd could see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def updated_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, whose calls after the first one leave running statistics as they are."""
    called = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if not called:
            called = True
            return fn(*args, **kwargs)
        with _Unchanged():
            return fn(*args, **kwargs)

    return run


class _Unchanged(TorchFunctionMode):
    """A mode in which copies of running statistics are updated. Where they are, their values make no difference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ARGUMENTS:
            given = dict(zip(_ARGUMENTS[func], args)) | kwargs
            if given.get("training", given.get("use_input_stats", func is F.instance_norm)):
                given |= {name: given[name].clone() for name in _STATISTICS if given.get(name) is not None}
            return func(**given)
        return func(*args, **kwargs)


_AFFINE, _STATISTICS = ("weight", "bias"), ("running_mean", "running_var")
_ARGUMENTS = {
    F.batch_norm: ("input", *_STATISTICS, *_AFFINE, "training", "momentum", "eps"),
    F.instance_norm: ("input", *_STATISTICS, *_AFFINE, "use_input_stats", "momentum", "eps"),
    torch.batch_norm: ("input", *_AFFINE, *_STATISTICS, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: ("input", *_AFFINE, *_STATISTICS, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}

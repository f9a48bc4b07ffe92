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

from shardlib.common._compat import TorchDispatchMode, no_modes, without_modes
from shardlib.common.environment import environment, within
from shardlib.common.once import Decision
from shardlib.common.writes import STATISTICS
from shardlib.rng import restore_generators, states_of_generators


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


# Decisions of blocks (`shardlib.common.once`), which are kept from a block's first run for its recomputation.


def decided_once(fn: Callable[..., Any], hidden_from: tuple[type[TorchDispatchMode], ...]) -> Callable[..., Any]:
    """``fn``, of which every call after the first takes over what the first one decided, in order.

    Args:
        hidden_from: dispatch modes that do not see how a decision is made: they count operations, and recomputation runs
            none of these.
    """
    kept: list[list[torch.Tensor]] = []
    runs = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        decides, number = runs == 1, 0
        around = environment().decides  # of a block that this one lies in, which may be in its recomputation

        def made(decide: Decision) -> list[torch.Tensor]:
            nonlocal number
            if decides:
                with without_modes(hidden_from):
                    kept.append(decide() if around is None else around(decide))
            number += 1
            return kept[number - 1]

        with within(decides=made):
            return fn(*args, **kwargs)

    return call


# Random numbers of blocks that are computed twice.


States = list[tuple[torch.Generator, torch.Tensor]]


class Draws:
    """The states of torch's generators before each block. They are kept once for blocks in which none is drawn from, so that
    host memory for them does not grow with the number of blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: States = []

    def repeated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, of which every call after the first draws what the first one drew, and leaves generators as they are."""
        first: States = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not first:
                first.extend(self._noted())
                return fn(*args, **kwargs)
            present = states_of_generators(self._device)
            restore_generators(first)
            try:
                return fn(*args, **kwargs)
            finally:
                restore_generators(present)

        return call

    def _noted(self) -> States:
        present = states_of_generators(self._device)
        with no_modes():  # a trace has no values
            if not (self._last and all(map(_equal, present, self._last))):
                self._last = present
        return self._last


def _equal(state: tuple[torch.Generator, torch.Tensor], other: tuple[torch.Generator, torch.Tensor]) -> bool:
    return state[0] is other[0] and torch.equal(state[1], other[1])


# The order in which tensors are moved: that of their memory, so that they come back with the strides they had.


Layout = tuple[tuple[int, ...], tuple[int, ...]]


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """A tensor's elements in the order of memory, and the sizes and strides by which ``as_strided`` makes it of them again.

    What has gaps or shares elements is copied first, without them.
    """
    dense = tensor.detach()
    if not _is_dense(dense):
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,)), (tuple(dense.size()), tuple(dense.stride()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, in any order, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride()) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True

"""Modules that were copied: their parameters, in whose place a function is given others, those of its call, and whether
something was done to a module since it was called last."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, MutableMapping, MutableSet
from types import FrameType
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.common._compat import pytree

Names = MutableMapping[torch.Tensor, str]
T = TypeVar("T")


class CopiedModule(Protocol):
    """A module that was copied, whose changes are carried over to the copy in its calls.

    Attributes:
        calls: the number of calls.
    """

    calls: int

    def differs(self) -> bool:
        """Whether something was done to the module since the last call."""
        ...


_all: Names = WeakTensorKeyDictionary()
_followed: MutableSet[CopiedModule] = WeakSet()
_lock = threading.Lock()  # simulated ranks are threads
_HIDDEN = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


def names_of(module: torch.nn.Module) -> Names:
    """The names of a module's parameters, with its class. They are remembered for `differentiated`."""
    names: Names = WeakTensorKeyDictionary()
    names.update({leaf: f"{type(module).__name__}'s {name}" for name, leaf in module.named_parameters()})
    _all.update(names)
    return names


def register(module: CopiedModule) -> None:
    """Let `called_in` know of a module."""
    with _lock:
        _followed.add(module)


def called_in(run: Callable[[], T]) -> tuple[T, list[CopiedModule]]:
    """``run()``, and the modules of which copies were called in it. (Those that other threads called meanwhile, too.)"""
    before = {each: each.calls for each in _all_followed()}
    result = run()
    return result, [each for each in _all_followed() if each.calls != before.get(each, 0)]


def _all_followed() -> list[CopiedModule]:
    with _lock:
        return list(_followed)


def differentiated(result: Any) -> list[str]:
    """The names of all modules' parameters to which the gradient of the tensors in ``result`` goes."""
    todo: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen, found = set(todo), set[str]()
    while todo:
        node = todo.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)  # of a node at which a gradient is accumulated
        if leaf is not None and leaf in _all:
            found.add(_all[leaf])
        after = {following for following, _ in node.next_functions} - seen
        seen |= after
        todo += after
    return sorted(found)


def function_of_user() -> str:
    """The innermost running function that is neither torch's nor this library's, with its line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}, line {frame.f_lineno} of {frame.f_code.co_filename}" if frame else "a function"

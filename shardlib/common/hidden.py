"""What objects hold where no pytree function finds it."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

TENSORS = (torch.Tensor, np.ndarray)
_MOST = 1000  # values that are looked at: an object may lead to all of a program
# What holds nothing that belongs to a batch or a result: a function's or a module's tensors are its own.
_OTHERS = (
    *TENSORS,
    *(str, bytes, int, float, complex, np.generic, type(None), type, torch.Generator, torch.nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def hides(leaf: Any, kinds: tuple[type, ...] = TENSORS) -> bool:
    """Whether a leaf of a pytree leads to an instance of ``kinds``: by its items, attributes or slots, or by theirs.

    >>> import types
    >>> hides(types.SimpleNamespace(layers=[{"keys": torch.ones(2)}])), hides(torch.ones(2)), hides(range(3))
    (True, False, False)
    """
    if isinstance(leaf, _OTHERS):
        return False
    todo, seen = deque([leaf]), dict[int, Any]()
    while todo and len(seen) < _MOST:
        value = todo.popleft()
        if isinstance(value, kinds):
            return True
        if not isinstance(value, _OTHERS) and id(value) not in seen:
            seen[id(value)] = value
            todo.extend(islice(held(value), _MOST))
    return False


def held(value: Any) -> Iterator[Any]:
    """The items of a container, the values of a mapping, and the attributes of an object, those in slots too."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        for member in vars(cls).values():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(value)
                except AttributeError:  # a slot that was never set
                    continue

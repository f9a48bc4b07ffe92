"""What a gradient transformation was made with: the numbers that its functions, or its state, hold, by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import optree
import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.wrappers.inject import InjectState
from shardlib.tree import Tree


def settings(optimizer: GradientTransformation) -> dict[str, str]:
    """Name -> value, of rates, decays and whatever else its functions, and the functions in these, have closed over.

    Of functions from outside the library only floats (rates that a schedule was made with): another number may well be a
    rank's own.
    """
    found: dict[str, str] = {}
    for name, value in _settings("optimizer", optimizer, set(), True):
        found.setdefault(name, value)
    return found


def injected(state: Tree) -> dict[str, str]:
    """Name -> value of the hyper-parameters that lie in the state, and may be written there between steps."""
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, InjectState))
    held = enumerate(node.hyperparams for node in nodes if isinstance(node, InjectState))
    return {f"{name} ({number})": repr(value.item()) for number, values in held for name, value in values.items()}


def _settings(name: str, value: Any, met: set[int], ours: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) or (ours and isinstance(value, (int, str, complex, torch.dtype))):
        yield name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an address is a process's own
        return
    if id(value) in met:
        return
    met.add(id(value))
    for part, held in _parts(value):
        inside = value.__module__.startswith("shardlib.") if isinstance(value, FunctionType) else ours
        yield from _settings(f"{name}/{part}", held, met, inside)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a value is made of, as far as it is known to be made of values."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from enumerate(value.__defaults__ or ())
        yield from (("constant", constant) for constant in value.__code__.co_consts if isinstance(constant, float))
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield value.__name__, value.__self__
    elif isinstance(value, partial):
        yield from (("function", value.func), *enumerate(value.args), *value.keywords.items())
    elif isinstance(value, GradientTransformation):
        yield from vars(value).items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)

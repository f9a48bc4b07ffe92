"""The hyper-parameters of a gradient transformation, found in its functions or its state, for ranks to compare."""

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
    """Name -> value of the rates, decays and other values that the optimizer's functions close over, also indirectly.

    Of functions from outside the library only floats (such as the rates of a schedule), since other values may rightly differ
    between ranks.
    """
    values: dict[str, str] = {}
    for name, value in _settings("optimizer", optimizer, set(), True):
        values.setdefault(name, value)
    return values


def injected(state: Tree) -> dict[str, str]:
    """Name -> value of the hyper-parameters in an optimizer's state, where a user may change them between steps."""
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, InjectState))
    held = enumerate(node.hyperparams for node in nodes if isinstance(node, InjectState))
    return {f"{name} ({number})": repr(value.item()) for number, values in held for name, value in values.items()}


def _settings(name: str, value: Any, met: set[int], internal: bool) -> Iterator[tuple[str, str]]:
    """The settings in ``value``. ``internal``: whether it belongs to a function of this library; ``met``: ids of values
    met."""
    if isinstance(value, float) or (internal and isinstance(value, (int, str, complex, torch.dtype))):
        yield name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes
        return
    if id(value) in met:
        return
    met.add(id(value))
    for key, held in _contents(value):
        inside = value.__module__.startswith("shardlib.") if isinstance(value, FunctionType) else internal
        yield from _settings(f"{name}/{key}", held, met, inside)


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Names and values that a value of a known type consists of."""
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

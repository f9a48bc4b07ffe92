"""Values that a function reads and is not given, which a graph of it has as constants: of its closure, and global ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from shardlib.nn.blocks import Sequential

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_MOST = 1000  # values that are read, so that a step takes no longer for a large table
_FOREIGN = ("torch", "shardlib", "numpy", "builtins")  # packages whose own state nobody changes


def closed_over(fn: Callable[..., Any] | Sequence[Callable[..., Any]]) -> tuple[tuple[str, str], ...]:
    """Names and values of what functions, and those that they call by name, read outside of their arguments.

    Plain values, and those in lists, tuples, dictionaries and attributes of plain objects that the code names; of a tensor
    which one it is, since a graph sees what is written to it. Modules are left out: what is done to them is seen otherwise.
    """
    found: dict[str, str] = {}
    seen = set[tuple[int, frozenset[str]]]()
    todo: list[_Closed] = [_Closed("", fn, frozenset())]
    while todo and len(found) < _MOST:
        read = todo.pop()
        name, value, names = read
        if isinstance(value, _PLAIN):
            found[name] = repr(value)
        elif isinstance(value, torch.Tensor):
            found[name] = f"a tensor ({id(value)})"
        elif (id(value), names) not in seen:
            seen.add((id(value), names))
            todo += _inside(read)
    return tuple(sorted(found.items()))


class _Closed(NamedTuple):
    """A value that a function reads.

    Attributes:
        name: what it is called.
        names: those of attributes, among others, in the function's code.
    """

    name: str
    value: Any
    names: frozenset[str]


def _inside(read: _Closed) -> Iterator[_Closed]:
    """The values in an object, or read by a function."""
    name, value, names = read
    if isinstance(value, functools.partial):
        yield from (_Closed(name, each, names) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield _Closed(name, value.__func__, names)
        yield _Closed("self", value.__self__, _names_in(value.__func__.__code__))
    elif isinstance(value, FunctionType):
        yield from _read_by(value)
    elif isinstance(value, Sequential):
        yield _Closed(name, value.functions, names)
    elif isinstance(value, Mapping):
        yield from (_Closed(f"{name}[{key!r}]", each, names) for key, each in list(value.items())[:_MOST])
    elif isinstance(value, list | tuple):
        yield from (_Closed(f"{name}[{place}]", each, names) for place, each in enumerate(value[:_MOST]))
    elif not isinstance(value, type | ModuleType | torch.nn.Module) and _is_own(value):
        for used in names:
            inside = vars(value).get(used, getattr(type(value), used, None))
            inside = MethodType(inside, value) if isinstance(inside, FunctionType) else inside
            yield _Closed(f"{name}.{used}", inside, names)


def _read_by(fn: FunctionType) -> Iterator[_Closed]:
    if (fn.__module__ or "").partition(".")[0] in _FOREIGN:
        return
    names = _names_in(fn.__code__)
    for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield _Closed(free, cell.cell_contents, names)
        except ValueError:  # not assigned yet
            continue
    yield from (_Closed(used, fn.__globals__[used], names) for used in names if used in fn.__globals__)
    yield from (_Closed(fn.__name__, each, names) for each in (fn.__defaults__, fn.__kwdefaults__))


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of attributes and global values in code, and in that of functions within it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_own(value: Any) -> bool:
    """Whether an object is of a class of the user's, with attributes."""
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _FOREIGN

"""Values that a function reads and is not given, which a graph of it has as constants: of its closure, and global ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch.fx import Node

from shardlib.errors import IllegalComposition
from shardlib.execute.graph.recorder import Recorder
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


# A look at whether a loss function computes the same when it is called again, as a graph of it would.
# What it takes from no tensor is a constant of a graph: Python's and NumPy's random numbers, and a count of its own calls.


class CallsDiffer(IllegalComposition):
    """A function computed something else when it was called again."""


@contextmanager
def without_random_numbers() -> Iterator[None]:
    """A context for a trace.

    Raises:
        IllegalComposition: the code in it draws from the global generators of Python or NumPy.
    """
    python, of_numpy = _states()
    yield
    now, of_numpy_now = _states()
    if now != python:
        raise IllegalComposition(_drawn("Python's random", "random.random()"))
    if of_numpy_now != of_numpy:
        raise IllegalComposition(_drawn("numpy.random", "numpy.random.rand()"))


def _states() -> tuple[Any, Any]:
    """The states of the global generators of Python and of NumPy."""
    words = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), (words["key"].tobytes(), words["pos"])


def _drawn(name: str, call: str) -> str:
    return (
        f"the loss function draws numbers by {name}, which a graph would draw once for all steps. Draw them outside of the "
        f"loss and put them into the batch as a tensor, torch.tensor({call})"
    )


class Repeated(Recorder):
    """A recorder of a function's second call, which refuses what differs from the first.

    Args:
        first: of the first call, and of what follows on it.
        last: the first call's last operation.

    Raises:
        CallsDiffer: names the first operation that differs.
    """

    def __init__(self, first: Recorder, last: Node) -> None:
        super().__init__(first.fakes)
        self._first = first
        nodes = list(first.graph.nodes)
        self._nodes = iter(nodes[: nodes.index(last) + 1])

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        before = next(self._nodes, None)
        if before is None or before.target != target or not _same([before.args, before.kwargs], [args, kwargs or {}]):
            raise _other(_told(before), f"{target}({', '.join(map(str, args))})")
        return before

    def end(self) -> None:
        """Refuse a call that ended before the first one, or that read other constants."""
        if (before := next(self._nodes, None)) is not None:
            raise _other(_told(before), "nothing")
        for name, now in self.constants.items():
            known = self._first.constants[name]
            if known is not now and not (known.shape == now.shape and bool(((known == now) | (now != now)).all())):
                raise _other(f"the constant {known}", str(now))


def _same(before: Any, now: Any) -> bool:
    """Whether two arguments are the same."""
    if isinstance(before, Node):
        return before is now
    if isinstance(before, dict):
        return _same(list(before.items()), list(now.items()))
    if isinstance(before, tuple | list):
        return len(before) == len(now) and all(map(_same, before, now))
    return type(before) is type(now) and (before == now or repr(before) == repr(now))


def _told(node: Node | None) -> str:
    return "nothing" if node is None else f"{node.target}({', '.join(map(str, node.args))})"


def _other(before: str, now: str) -> CallsDiffer:
    return CallsDiffer(
        f"the loss function computes something else when it is called again on the same tensors ({before}, and then {now}): "
        "it reads something that changes and is no tensor, such as a count of its calls, which would be a constant of a "
        "graph. Put it into the batch as a tensor, torch.tensor(count)"
    )

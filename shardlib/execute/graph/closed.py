"""What a function reads and is not given, which a graph of it has as constants: values of its closure, and global ones; and
what its calls change there, which a graph of it does not."""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy
import torch

from shardlib.common._compat import NO_ATTRIBUTES, FakeTensor, pytree
from shardlib.common.environment import environment
from shardlib.nn.blocks import Sequential
from shardlib.tree import Tree, leaves_of

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), numpy.generic, Enum)
_MOST = 1000  # values of a table that are read, so that a step takes no longer for a large one
_FOREIGN = ("torch", "shardlib", "numpy", "builtins")  # packages whose own state nobody changes
# Methods that code calls without naming them.
_CALLED = (
    "__call__", "__getattr__", "__getitem__", "__len__", "__iter__", "__contains__", "__float__", "__int__", "__bool__",
    "__enter__", "forward", "backward", "jvp", "setup_context",
)  # fmt: skip
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ABSENT = object()
_LRU_CACHE = type(functools.cache(len))

_Named = tuple[str, Any]


def closed_over(fn: Any, trees: Sequence[Tree]) -> tuple[tuple[str, str], ...]:
    """Names and values of what functions, and those that they call by name, read outside of the tensors in ``trees``, which
    they are given (see `Reached`), and of what is set around them."""
    around = ("torch.autocast", str(environment().casts)), ("torch.get_default_dtype()", str(torch.get_default_dtype()))
    objects = [leaf for tree in trees for leaf in leaves_of(tree) if _told(leaf) is None]
    return *around, *Reached(fn, *objects).values


class Reached:
    """What functions and objects reach: plain values, and those in tables (of large ones the first), in modules of torch, and
    in those attributes of objects, classes and imported modules that any of the code names.

    Attributes:
        values: names and values; of a tensor which one it is, since a graph sees what is written to it.
    """

    values: list[_Named]

    def __init__(self, *roots: Any) -> None:
        self.values = []
        self._names, self._objects = set(_CALLED), list[_Named]()  # of attributes; and what may have some
        seen = set[int]()
        todo = deque[_Named](("", root) for root in roots)
        while todo:
            name, value = todo.popleft()
            if (told := _told(value)) is not None:
                self.values.append((name, told))
            elif id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, FunctionType) and not _is_installed(value.__code__.co_filename):
                    new = _names_in(value.__code__) - self._names
                    self._names |= new
                    todo += [each for known in self._objects for each in _attributes(*known, new)]
                self._objects.append((name, value))
                todo += [*_attributes(name, value, self._names), *_inside(name, value)]

    def held(self) -> Held:
        """What can be changed, as it is now; but for the parameters and buffers of modules, which their calls put in."""
        held, modules = Held(), [vars(value) for _, value in self._objects if isinstance(value, torch.nn.Module)]
        put = {id(inside.get(key)) for inside in modules for key in NO_ATTRIBUTES}
        for name, value in self._objects:
            if id(value) in put:
                continue
            if isinstance(value, FunctionType):
                for free, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                    held.add(free, cell, ["cell_contents"])
                if not _is_installed(value.__code__.co_filename):
                    held.add("", value.__globals__, _names_in(value.__code__) & value.__globals__.keys())
            elif isinstance(value, list | deque | set):
                held.tables.append((name, value, value.copy()))
            elif isinstance(value, _LRU_CACHE):
                held.caches.append((value, value.cache_info()))
            elif isinstance(value, type):
                if _is_own(value.__module__):
                    held.add(name, value, {key for key in vars(value).keys() & self._names if key[:2] != "__"})
            elif isinstance(value, dict) or hasattr(value, "__dict__"):
                held.add(name, value if isinstance(value, dict) else vars(value), None)
        return held


class Held:
    """What can be changed, and what it held."""

    def __init__(self) -> None:
        self.tables: list[tuple[str, Any, Any]] = []  # name, a list, a queue or a set, and a copy
        self.caches: list[tuple[Any, Any]] = []  # of functools.lru_cache, and what was known of them
        self._slots: list[tuple[str, Any, Any, Any]] = []  # name, holder, key, value
        self._whole: list[tuple[str, dict[Any, Any], Collection[Any]]] = []  # dictionaries, and their keys

    def add(self, name: str, holder: Any, keys: Collection[Any] | None) -> None:
        """Hold the values of some keys or attributes, or of all of a dictionary."""
        if keys is None:
            keys = list(holder)
            self._whole.append((name, holder, set(keys)))
        self._slots += [(f"{name}.{key}".strip("."), holder, key, _get(holder, key)) for key in keys]

    def fakes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The fake tensors that are held now, with their names."""
        changed = (each for each in self._slots if _get(each[1], each[2]) is not each[3])
        for name, holder, key, _ in (*changed, *self._added()):
            yield from ((name, fake) for fake in _fakes(_get(holder, key)))
        for name, table, _ in self.tables:
            yield from ((name, fake) for fake in _fakes(list(table)))

    def restore(self) -> None:
        """Let everything hold again what it held."""
        for _, holder, key, before in (*self._slots, *self._added()):
            if _get(holder, key) is not before:
                _set(holder, key, before)
        for _, table, values in self.tables:
            if len(table) != len(values) or any(now is not then for now, then in zip(table, values)):
                _refill(table, values)
        for cache, known in self.caches:
            if cache.cache_info() != known:  # nobody can look into it
                cache.cache_clear()

    def _added(self) -> Iterator[tuple[str, Any, Any, Any]]:
        for name, held, keys in self._whole:
            yield from ((f"{name}[{key!r}]", held, key, _ABSENT) for key in held.keys() - keys)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return dict.get(holder, key, _ABSENT)  # a class may have its own
    try:
        return getattr(holder, key, _ABSENT)
    except ValueError:  # a variable of a closure that has no value yet
        return _ABSENT


def _set(holder: Any, key: Any, value: Any) -> None:
    if value is _ABSENT:
        dict.pop(holder, key, None) if isinstance(holder, dict) else delattr(holder, key)
    elif isinstance(holder, dict):
        dict.__setitem__(holder, key, value)
    else:
        setattr(holder, key, value)


def _refill(table: Any, values: Any) -> None:
    table.clear()
    (table.update if isinstance(table, set) else table.extend)(values)


def _fakes(value: Any) -> list[FakeTensor]:
    """The fake tensors in a value, as deep as torch's own pytrees go."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]


def _told(value: Any) -> str | None:
    """A plain value, or which tensor it is, as text; None of other values."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        form = f" {value.dtype} {tuple(value.shape)}" if type(value) is torch.Tensor else ""
        return f"a {type(value).__name__} ({id(value)}){form}"
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape} {value.ravel()[:_MOST].tobytes()!r}"
    return None


def _attributes(name: str, value: Any, names: Collection[str]) -> Iterator[_Named]:
    """The attributes of these names that an object has, or its class."""
    held: list[Mapping[str, Any]]
    if isinstance(value, ModuleType):
        held = [vars(value)] if _is_own(value.__name__) else []
    else:
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        held = [vars(kind) for kind in kinds if _is_own(kind.__module__)]
        if isinstance(value, FunctionType) or (
            not isinstance(value, type)
            and type(value).__module__.partition(".")[0] not in _FOREIGN
            and hasattr(value, "__dict__")
        ):
            held.append(vars(value))
    for each in held:
        for used in sorted(each.keys() & names):
            inside = each[used]
            if isinstance(inside, MemberDescriptorType) and not isinstance(value, type):  # of __slots__
                inside = getattr(value, used, None)
            yield f"{name}.{used}", inside


def _inside(name: str, value: Any) -> Iterator[_Named]:
    """The values in an object, or read by a function."""
    if isinstance(value, FunctionType):
        yield from _read_by(value)
    elif isinstance(value, functools.partial):
        yield from ((name, each) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((name, value.__func__), ("self", value.__self__))
    elif isinstance(value, staticmethod | classmethod):
        yield name, value.__func__
    elif isinstance(value, _LRU_CACHE):
        yield name, value.__wrapped__
    elif isinstance(value, property):
        yield name, value.fget
    elif isinstance(value, Sequential):
        yield name, value.functions
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{key}", each) for key, each in list(vars(value).items()))
    elif isinstance(value, set | frozenset):
        yield name, str(sorted(map(repr, value)))
    elif isinstance(value, Mapping | list | tuple | deque):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield f"the length of {name}", len(value)
        yield from ((f"{name}[{key!r}]", each) for key, each in itertools.islice(list(entries), _MOST))


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is the user's own, and not installed."""
    package = module.partition(".")[0]
    if package in _FOREIGN or package in sys.stdlib_module_names:
        return False
    return not _is_installed(getattr(sys.modules.get(module), "__file__", None) or "")


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED)


def _read_by(fn: FunctionType) -> Iterator[_Named]:
    if (fn.__module__ or "").partition(".")[0] in _FOREIGN:
        return
    for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield free, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if _is_installed(fn.__code__.co_filename):
        return
    yield from ((used, fn.__globals__[used]) for used in sorted(_names_in(fn.__code__)) if used in fn.__globals__)
    yield from ((fn.__name__, each) for each in (fn.__defaults__, fn.__kwdefaults__))


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of attributes and global values in code, and in that of functions within it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    asked = [each for each in code.co_consts if isinstance(each, str)] if "getattr" in code.co_names else []
    return frozenset((*code.co_names, *asked)).union(*map(_names_in, inner))

"""Copies of modules that are whole: the functions in them, too, use the copies."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import compiled_call, compiler_of, is_compiler, set_compiled_call, storage_id
from shardlib.errors import TreeError

_ATOMIC = (
    *(type(None), bool, int, float, complex, str, bytes, type, ModuleType, CodeType, BuiltinFunctionType, property),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, weakref.ref),
)


class Copy:
    """A deep copy, as `copy.deepcopy` makes it, in which functions that hold parts of a module hold the copies of them.

    `copy.deepcopy` takes functions as they are: a lambda in a module's copy, a decorated method of an instance, a closure
    would go on calling the original's layers. Code and globals of a function are not copied, only what its closure, its
    defaults and its attributes hold. A result of torch.compile is compiled anew, with the same arguments.

    Args:
        modules, tensors: the parts, tensors by name.
        memo: id of an object -> what stands for it in the copy. The objects must outlive this one.

    Attributes:
        pairs: every copied object that has attributes and is no container, with its copy.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Mapping[str, torch.Tensor], memo: dict[int, Any]) -> None:
        self._parts, self._memo = {id(part) for part in (*modules, *tensors.values())}, memo
        self._storages = {
            storage_id(tensor.untyped_storage()): name for name, tensor in tensors.items() if _has_memory(tensor)
        }
        self._kept: list[Any] = []  # so that no id in the memo is used again
        self._harmless: set[int] = set()  # ids of what holds none of the parts
        self.pairs: list[tuple[Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _ATOMIC) or is_compiler(value):
            return value
        known = self._memo.get(id(value), self)
        return self._copied(value) if known is self else known

    def holds_parts(self, value: Any) -> bool:
        """Whether any of the parts can be reached from a value."""
        reached: dict[int, Any] = {}
        todo = [value]
        while todo:
            value = todo.pop()
            if id(value) in self._parts:
                return True
            if id(value) in reached or id(value) in self._harmless or isinstance(value, _ATOMIC):
                continue
            reached[id(value)] = value
            todo += _inside(value)
        self._harmless |= reached.keys()
        self._kept += reached.values()
        return False

    def _copied(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            made = self._known_as(value, {})
            made.update({self(key): self(item) for key, item in value.items()})
        elif kind is list:
            made = self._known_as(value, [])
            made += map(self, value)
        elif kind is tuple:
            items = tuple(map(self, value))
            made = value if all(map(is_, items, value)) else items
        elif kind is FunctionType:
            made = self._function(value) if self.holds_parts(value) else value
        elif kind is MethodType:
            made = MethodType(self(value.__func__), self(value.__self__))
        elif hasattr(kind, "__deepcopy__"):
            self._require_own_memory(value)
            made = value.__deepcopy__(self._memo)
        else:
            return self._reduced(value)
        return self._known_as(value, made)

    def _require_own_memory(self, value: Any) -> None:
        """Refuse a tensor that is a view of one of the parts, which the copy would not follow.

        Raises:
            TreeError: see above.
        """
        owner = self._storages.get(storage_id(value.untyped_storage())) if _has_memory(value) else None
        if owner is not None:
            raise TreeError(
                f"the module holds a view of {owner} (its .data, detached or transposed), of shape {tuple(value.shape)}, "
                "which would not follow it. Compute it from the parameter in forward, or keep a copy: tensor.clone()"
            )

    def _known_as(self, value: Any, made: Any) -> Any:
        self._kept.append(value)
        return self._memo.setdefault(id(value), made)  # the first, where a circle led back to the value

    def _function(self, function: FunctionType) -> Any:
        if compile_ := compiler_of(function):
            return compile_(self(compiled_call(function)))
        cells = tuple(self._memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
        made = self._known_as(
            function, FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        )
        made.__qualname__, made.__doc__, made.__module__ = function.__qualname__, function.__doc__, function.__module__
        made.__annotations__ = function.__annotations__
        made.__defaults__, made.__kwdefaults__ = self(function.__defaults__), self(function.__kwdefaults__)
        made.__dict__.update(self(function.__dict__))
        for cell, new in zip(function.__closure__ or (), cells):
            for content in _contents(cell):
                new.cell_contents = self(content)
        return made

    def _reduced(self, value: Any) -> Any:
        """The copy of an object by pickle's protocol."""
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(reduced, str):  # the name of a global
            return value
        make, args, state, items, entries = (*reduced, None, None, None)[:5]
        made = self._known_as(value, make(*map(self, args)))
        if hasattr(made, "__dict__") and not isinstance(made, dict | list):
            self.pairs.append((value, made))
        if state is not None:
            state = self(state)
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                for held in state if isinstance(state, tuple) else (state,):  # of its dictionary, then of its slots
                    for name, item in (held or {}).items():
                        setattr(made, name, item)
        for item in items or ():
            made.append(self(item))
        for key, item in entries or ():
            made[self(key)] = self(item)
        if compiled := compiled_call(value):  # a module's, which its state leaves out
            set_compiled_call(made, self(compiled))
        return made


def _has_memory(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and not value.is_meta
        and value.layout == torch.strided
        and value.numel() > 0
    )


def _contents(cell: CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return


def _inside(value: Any) -> Iterable[Any]:
    """What a copy of a value would copy too."""
    if isinstance(value, FunctionType):
        if compiled := compiled_call(value):
            return [compiled]
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return held + [content for cell in value.__closure__ or () for content in _contents(cell)]
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    return () if isinstance(value, torch.Tensor) or is_compiler(value) else gc.get_referents(value)

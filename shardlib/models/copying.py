"""Copies of modules: the functions in them use the copies too, and placeholders or meta tensors stand for their tensors."""

from __future__ import annotations

import copy
import copyreg
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shardlib.common._compat import (
    compiled_call,
    compiler_of,
    is_compiler,
    no_torch_function,
    own_buffers,
    own_parameters,
    pre_hooks,
    pytree,
    set_compiled_call,
    storage_id,
    wrapper_subclass,
)
from shardlib.errors import TreeError, listing

T = TypeVar("T")

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
        """Raise `TreeError` for a tensor that is a view of one of the parts, which the copy would not follow."""
        owner = self._storages.get(storage_id(value.untyped_storage())) if _has_memory(value) else None
        if owner is not None:
            raise TreeError(
                f"the module holds a view of {owner} (its .data, detached or transposed), which would not follow it. Compute "
                "it in forward, or keep tensor.clone()"
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
                own, slots = state if isinstance(state, tuple) else (state, None)
                if own:
                    made.__dict__.update(own)  # not by setattr, which frozen dataclasses refuse
                for name, item in (slots or {}).items():
                    object.__setattr__(made, name, item)
        for item in items or ():
            made.append(self(item))
        for key, item in entries or ():
            made[self(key)] = self(item)
        if compiled := compiled_call(value):  # a module's, which its state leaves out
            set_compiled_call(made, self(compiled))
        return made


def joined(path: str, name: str) -> str:
    """The dotted name of what the module at ``path`` has by a name."""
    return f"{path}.{name}" if path else name


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Dotted name -> buffer, with buffers that are None."""
    return {
        joined(path, name): buffer
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in own_buffers(owner).items()
    }


def clones(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


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


# Tensors without memory that stand, in a module's copy, wherever the module held a parameter or a buffer.
# In its own dictionaries a module has the tensors of the present call. Whatever else holds a parameter (a plain object, a
# list, a closure) has the placeholder, any use of which is a use of the tensor that the module has by its name.


class Placeholder(torch.Tensor):
    """A tensor that stands for a parameter or buffer of a module; see above.

    Args:
        path: the name of the tensor in the whole module.
        like: the tensor.
    """

    _owner: nn.Module
    _path: str

    @staticmethod
    def __new__(cls, path: str, like: torch.Tensor) -> Placeholder:
        with no_torch_function():
            made = wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("meta"))
        made._path, made._is_param = path, isinstance(like, nn.Parameter)  # what isinstance(made, nn.Parameter) asks
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def present(self) -> torch.Tensor:
        """The tensor that the module has now. Raises `TreeError`: the module is in no call that has it."""
        name = self._path.rpartition(".")[2]
        held = own_parameters(self._owner).get(name, own_buffers(self._owner).get(name))
        if held is None or held is self:
            raise TreeError(f"{self._path} is used outside of a call that has it. Use it inside of apply(params, ...)")
        if not torch.is_grad_enabled() and _in_function():
            raise TreeError(
                f"{self._path} was given to an autograd.Function by what is no module (a closure, a list), and would get no "
                "gradient. Give it the module's attribute, or weight.view_as(weight)"
            )
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Placeholder, Placeholder.present, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        paths = {value._path for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Placeholder)}
        names = ", ".join(sorted(paths))
        raise TreeError(f"{names}: read below torch's functions by what is no module. Read the module's attribute")


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _in_function() -> bool:
    """Whether the forward of an autograd.Function runs, whose arguments alone are differentiated."""
    frame = sys._getframe()
    while frame.f_code is not _APPLY and frame.f_back:
        frame = frame.f_back
    return frame.f_code is _APPLY


class Copied(NamedTuple):
    """A copy of a module in which each parameter and buffer is one placeholder, wherever the module has it.

    Attributes:
        copier: what made the copy.
        placeholders: by the names of parameters and buffers; of tied ones the first.
    """

    module: nn.Module
    copier: Copy
    placeholders: dict[str, Placeholder]


def copy_with_placeholders(module: nn.Module) -> Copied:
    """A copy of a module, or of the module of another `Copied`."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    placeholders = {name: Placeholder(name, tensor) for name, tensor in tensors.items()}
    held: dict[int, Any] = {id(tensor): placeholders[name] for name, tensor in tensors.items()}
    copier = Copy(module.modules(), tensors, held)
    made = copier(module)
    for name, placeholder in placeholders.items():
        placeholder._owner = made.get_submodule(name.rpartition(".")[0])
    return Copied(made, copier, placeholders)


def copied_or_refused(module: nn.Module, copy_of: Callable[[nn.Module], T]) -> T:
    """A copy of a module. Raises `TreeError`: the module has attributes that cannot be copied."""
    try:
        return copy_of(module)
    except Exception:
        _require_copies(module)
        raise


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device, tied ones still tied. Raises `TreeError`: the module has attributes
    that cannot be copied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copied_or_refused(module, Copy(module.modules(), dict(module.named_parameters()), memo))


_OLD_NORMS = {
    "WeightNorm": "weight_norm",
    "SpectralNorm": "spectral_norm",
}  # a hook's class -> the function that adds it


def _require_copies(module: nn.Module) -> None:
    """Raise a `TreeError` that lists the attributes of a module that cannot be copied."""
    failures = []
    memo = {id(known): known for known in (*module.modules(), *module.parameters(), *module.buffers())}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                why = f"{type(error).__name__}: {error}" if not isinstance(value, torch.Tensor) else _computed(owner)
                failures.append(f"{joined(path, name)}: {why}")
    if failures:
        raise TreeError(
            f"from_module calls copies of the module, and these attributes cannot be copied:\n{listing(failures)}\nSet them "
            "in forward, or give their class a __deepcopy__"
        )


def _computed(owner: nn.Module) -> str:
    """The remedy for an attribute of ``owner`` that is a tensor computed from parameters."""
    for hook in pre_hooks(owner):
        kind = type(hook)
        if kind.__name__ in _OLD_NORMS and kind.__module__.startswith("torch.nn.utils."):
            old = _OLD_NORMS[kind.__name__]
            return f"made by torch.nn.utils.{old}; use torch.nn.utils.parametrizations.{old}"
        if kind.__module__ == "torch.nn.utils.prune":
            return "made by torch.nn.utils.prune; call prune.remove(module, name) first"
    return "a tensor with a graph; compute it in forward, or detach it"

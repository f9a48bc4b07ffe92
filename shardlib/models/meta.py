"""Initial values of a module on the meta device, by its submodules' ``reset_parameters`` and a model's ``_init_weights``.

``_init_weights(module)`` is the method by which a model of transformers initialises each of its submodules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardlib import init
from shardlib.common._compat import (
    OperatorMode,
    no_modes,
    no_torch_function,
    own_buffers,
    own_parameters,
    pytree,
    storage_id,
    wrapper_subclass,
    writes,
)
from shardlib.errors import TreeError, listing
from shardlib.models.copying import Copy
from shardlib.models.layers import require_no_adapters
from shardlib.rng import Key

_REMEDY = (
    "Give them a reset_parameters(), or pass sl.shard a function that builds the module on the CPU: lambda: "
    "sl.from_module(Model())[1]"
)


def sharing(module: nn.Module) -> nn.Module:
    """A copy of a module partly on the meta device, of which parameters that have values are the same tensors."""
    return copy.deepcopy(module, {id(leaf): leaf for leaf in module.parameters() if not leaf.is_meta})


def initialised(given: nn.Module, key: Key, names: Collection[str] | None = None) -> nn.Module:
    """A copy of a meta module with values, set by each submodule's ``reset_parameters`` and by ``_init_weights``. Parameters
    that have values are the same tensors.

    Args:
        names: of the parameters that get values; by default all on the meta device.

    Raises:
        TreeError: neither of them writes some of these, or they are peft's, which starts its adapters in another way; lists
            all of them.
    """
    real = {name: leaf for name, leaf in given.named_parameters(remove_duplicate=False) if not leaf.is_meta}
    with no_modes():  # the copy is not to be recorded; and initialisers write to what they find
        module = copy.deepcopy(
            given, {id(leaf): nn.Parameter(leaf.to("meta"), leaf.requires_grad) for leaf in real.values()}
        )
    every = dict(module.named_parameters(remove_duplicate=False))
    drawn = {name for name in every.keys() - real.keys() if names is None or name in names}
    require_no_adapters(module, drawn)
    wanted = {id(every[name]) for name in drawn}
    owners = [
        (owner, start)
        for owner, start in _owners(module)
        if names is None or any(id(leaf) in wanted for leaf in owner.parameters())
    ]
    made: dict[int, Any] = {}
    with torch.no_grad(), _Counted(key) as counted:
        for owner, start in owners:
            _empty(owner, made, wanted)
            _begin(owner, start)
    written = ((name, leaf) for name, leaf in module.named_parameters() if name in drawn)
    _require_written(module, written, counted, "parameters")
    for name, leaf in real.items():
        path, _, last = name.rpartition(".")
        own_parameters(module.get_submodule(path))[last] = leaf
    return module


def reset_buffers(module: nn.Module, filled_later: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Real values for a meta module's buffers, submodule by submodule.

    Args:
        filled_later: names of buffers that need memory only.

    Raises:
        TreeError: neither ``reset_parameters`` nor ``_init_weights`` writes some buffers; lists all of these.
    """
    starts = {id(owner): start for owner, start in _owners(module)}
    values = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    failures = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if not any(buffer.is_meta for buffer in owner.buffers(recurse=False)):
            continue
        real = copy.deepcopy(owner).to_empty(device="cpu", recurse=False)
        with torch.no_grad(), _Counted(Key(torch.initial_seed())) as counted:
            _begin(real, starts[id(owner)])
        for name, buffer in real.named_buffers(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if path in values:
                continue
            values[path] = buffer
            if path not in filled_later and not counted.wrote(buffer):
                failures.append(f"{path}: {type(owner).__name__}")
    if failures:
        raise TreeError(
            f"buffers on the meta device that neither reset_parameters() nor a model's _init_weights() writes:\n"
            f"{listing(failures)}\n{_REMEDY}"
        )
    return values


Start = Callable[[nn.Module], Any] | None


def _owners(module: nn.Module, start: Start = None) -> Iterator[tuple[nn.Module, Start]]:
    """Every submodule, children first, with the ``_init_weights`` of the innermost model that contains it."""
    start = getattr(module, "_init_weights", start)
    for child in module.children():
        yield from _owners(child, start)
    yield module, start


def _begin(owner: nn.Module, start: Start) -> None:
    if callable(getattr(owner, "reset_parameters", None)):
        owner.reset_parameters()  # type: ignore[operator]
    if start is not None:
        start(owner)


def _empty(owner: nn.Module, made: dict[int, Any], wanted: Collection[int]) -> None:
    """Allocates a meta submodule's tensors, of its parameters the ``wanted``; tied ones stay tied. (Module.to_empty does not
    work while recorded.)"""
    for name, old in owner.named_parameters(recurse=False, remove_duplicate=False):
        if id(old) in wanted:
            if id(old) not in made:
                made[id(old)] = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad), old
            setattr(owner, name, made[id(old)][0])
    for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
        if buffer.is_meta:
            if id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device="cpu"), buffer
            own_buffers(owner)[name] = made[id(buffer)][0]


def _require_written(module: nn.Module, leaves: Any, counted: _Counted, what: str) -> None:
    owners = dict(module.named_modules())
    missing = [
        f"{name}: {type(owners[name.rpartition('.')[0]]).__name__}" for name, leaf in leaves if not counted.wrote(leaf)
    ]
    if missing:
        raise TreeError(
            f"{what} on the meta device that neither reset_parameters() nor a model's _init_weights() writes:\n"
            f"{listing(missing)}\n{_REMEDY}"
        )


class _Counted(OperatorMode):
    """A mode in which in-place draws from normal and uniform distributions use counter-based keys.

    So a rank that records an initialiser (see `shardlib.init.deferred`) draws only its shard of a parameter. The mode also
    notes which tensors are written to.
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key, self._draws = key, 0
        self._written: dict[int, Any] = {}

    def wrote(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._written or tensor.numel() == 0

    def _take(self, op: Any, args: Any, kwargs: Any) -> Any:
        if writes(op) and args and isinstance(args[0], torch.Tensor):
            storage = args[0].untyped_storage()
            self._written[storage_id(storage)] = storage  # kept alive, so that its id is not used again
        draw = _DRAWS.get(op)
        if draw is None or kwargs.get("generator") is not None or not _drawn(args[0]):
            return op(*args, **kwargs)
        tensor, *numbers = args
        self._draws += 1
        key = self._key.fold_in(self._draws)
        return tensor.copy_(draw(key, tensor.shape, *numbers, dtype=tensor.dtype, device=tensor.device))


def _drawn(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def _normal(key: Key, shape: torch.Size, mean: float = 0.0, std: float = 1.0, **like: Any) -> torch.Tensor:
    return init.normal(key, shape, std, mean, **like)


_DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.normal_.default: _normal,
    torch.ops.aten.uniform_.default: init.uniform,
}


# Tensors without memory that stand, in a module's copy, wherever the module held a parameter or a buffer.
# In its own dictionaries a module has the tensors of the present call. Whatever else holds a parameter (a plain object, a
# list, a closure) has the placeholder, any use of which is a use of the tensor that the module has by its name.


class Placeholder(torch.Tensor):
    """A tensor that stands for a parameter or buffer of a module; see the module's docstring.

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
        """The tensor that the module has now.

        Raises:
            TreeError: the module is in no call that has it.
        """
        name = self._path.rpartition(".")[2]
        held = own_parameters(self._owner).get(name, own_buffers(self._owner).get(name))
        if held is None or held is self:
            raise TreeError(
                f"{self._path} is used outside of a call that has it: by a block that it is not a parameter of, or after the "
                "call. Use it inside of apply(params, ...)"
            )
        if not torch.is_grad_enabled() and _in_function():
            raise TreeError(
                f"{self._path} was given to an autograd.Function, or to what runs in one, by what is no module (a closure, a "
                "list, a plain object), so that it would get no gradient. Give the function the module's own attribute, or a "
                "view: weight.view_as(weight)"
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
        raise TreeError(
            f"{', '.join(sorted(paths))}: read by code below torch's functions, through what is no module (a closure, a "
            "list, a plain object). Read the module's own attribute"
        )


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

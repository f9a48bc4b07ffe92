"""Initial values of a module on the meta device, by its submodules' ``reset_parameters`` and a model's ``_init_weights``.

``_init_weights(module)`` is the method by which a model of transformers initialises each of its submodules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from shardlib import init
from shardlib.common._compat import (
    OperatorMode,
    no_modes,
    own_buffers,
    own_parameters,
    storage_id,
    writes,
)
from shardlib.errors import TreeError, listing
from shardlib.models.copying import joined
from shardlib.models.peft import require_no_adapters
from shardlib.models.quantized_linears import QuantizedLinear
from shardlib.rng import Key


def sharing(module: nn.Module) -> nn.Module:
    """A copy of a module partly on the meta device, of which parameters that have values are the same tensors."""
    return copy.deepcopy(module, {id(leaf): leaf for leaf in module.parameters() if not leaf.is_meta})


def initialised(given: nn.Module, key: Key, names: Collection[str] | None = None) -> nn.Module:
    """A copy of a meta module with values, set by each submodule's ``reset_parameters`` and by ``_init_weights``. Parameters
    that have values are the same tensors. Raises `TreeError`: neither of them writes some of these, or they are peft's, which
    starts its adapters in another way; lists all of them. ``names``: of the parameters that get values; by default all on the
    meta device."""
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
    with torch.no_grad(), CountedDraws(key) as counted:
        for owner, start in owners:
            _empty(owner, made, wanted)
            _begin(owner, start)
    kinds = {path: type(owner).__name__ for path, owner in module.named_modules()}
    missing = [name for name, leaf in module.named_parameters() if name in drawn and not counted.wrote(leaf)]
    _require_none("parameters", [f"{name}: {kinds[name.rpartition('.')[0]]}" for name in missing])
    for name, leaf in real.items():
        path, _, last = name.rpartition(".")
        own_parameters(module.get_submodule(path))[last] = leaf
    return module


def reset_buffers(module: nn.Module, filled_later: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Real values for a meta module's buffers, submodule by submodule. Raises `TreeError`: neither ``reset_parameters`` nor
    ``_init_weights`` writes some buffers; lists all of these. ``filled_later``: names of buffers that need memory only."""
    starts = {id(owner): start for owner, start in _owners(module)}
    values = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    failures = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if not any(buffer.is_meta for buffer in owner.buffers(recurse=False)):
            continue
        real = copy.deepcopy(owner).to_empty(device="cpu", recurse=False)
        with torch.no_grad(), CountedDraws(Key(torch.initial_seed())) as counted:
            _begin(real, starts[id(owner)])
        for name, buffer in real.named_buffers(recurse=False):
            path = joined(prefix, name)
            if path in values:
                continue
            values[path] = buffer
            if path not in filled_later and not counted.wrote(buffer):
                failures.append(f"{path}: {type(owner).__name__}")
    _require_none("buffers", failures)
    return values


def _require_none(what: str, missing: list[str]) -> None:
    if missing:
        raise TreeError(
            f"{what} on the meta device that neither reset_parameters() nor a model's _init_weights() writes:\n"
            f"{listing(missing)}\nAdd a reset_parameters(), or pass sl.shard a function that builds the module on the CPU"
        )


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
    if start is not None and not isinstance(owner, QuantizedLinear):  # whose weight is made anew for each look at it
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


class CountedDraws(OperatorMode):
    """A mode in which in-place draws from normal and uniform distributions use counter-based keys.

    So a rank that records an initialiser (see `shardlib.init.deferred`) draws only its shard of a parameter. The mode also
    notes which tensors are written to."""

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
        if draw is None or kwargs.get("generator") is not None or args[0].is_meta or not args[0].is_floating_point():
            return op(*args, **kwargs)
        tensor, *numbers = args
        self._draws += 1
        key = self._key.fold_in(self._draws)
        return tensor.copy_(draw(key, tensor.shape, *numbers, dtype=tensor.dtype, device=tensor.device))


_DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.normal_.default: lambda key, shape, mean=0.0, std=1.0, **like: init.normal(
        key, shape, std, mean, **like
    ),
    torch.ops.aten.uniform_.default: init.uniform,
}

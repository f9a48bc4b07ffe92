"""Any `nn.Module` as a pure function of its parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from shardlib.errors import TreeError, listing
from shardlib.tree import Tree


def from_module(module: nn.Module, buffers: bool = False) -> tuple[Any, ...]:
    """A module as ``(apply, params)``, or with ``buffers=True`` as ``(apply, params, buffers)``.

    ``apply(params, *args, **kwargs)`` calls the module; with buffers ``apply(params, buffers, *args, **kwargs)``
    returns ``(output, buffers)``. ``params`` is a nested dictionary by module path in which a ModuleList or
    Sequential is a list; its tensors are the module's own. Tied parameters stay tied. ``apply`` keeps the module's
    structure and mode (train or eval) as they are now.

    A module on the meta device has no values yet: then ``params`` is a function that makes them by each
    submodule's ``reset_parameters``, to be passed to `shardlib.shard`, which runs it piece by piece.

    Raises:
        TreeError: parameters with ``requires_grad=False`` (say so with `shardlib.freeze`), or on the meta device
            without a way to initialise them. From ``apply``: a buffer changed and ``buffers=True`` was not given.
    """
    _refuse_frozen(module)
    held = dict(module.named_buffers(remove_duplicate=False))
    if any(buffer.is_meta for buffer in held.values()):
        held = _reset_buffers(module)
    structure = _Skeletons(module, held)
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    params: Any = partial(_initialise, _hollow(module)) if on_meta else _nest(_own_parameters(module))

    if not buffers:

        def apply(params: Tree, *args: Any, **kwargs: Any) -> Any:
            skeleton = structure.get()
            versions = [buffer._version for buffer in skeleton.buffers()]
            out = functional_call(skeleton, _flat(params), args, kwargs, tie_weights=False)
            changed = [
                name
                for (name, buffer), version in zip(skeleton.named_buffers(), versions, strict=True)
                if buffer._version != version
            ]
            if changed:
                raise TreeError(
                    f"the module changed its buffers, which a pure function cannot:\n{listing(changed)}\nUse apply, params, "
                    "buffers = sl.from_module(module, buffers=True), or module.eval()"
                )
            return out

        return apply, params

    def apply_with_buffers(params: Tree, buffers: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        fresh = {name: buffer.clone() for name, buffer in buffers.items()}
        out = functional_call(structure.get(), _flat(params) | fresh, args, kwargs, tie_weights=False)
        return out, fresh

    return apply_with_buffers, params, {name: buffer.detach().clone() for name, buffer in held.items()}


class _Skeletons:
    """The module without weights, one copy per thread: a call swaps weights into the module itself."""

    def __init__(self, module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        self._first = _hollow(module)
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            self._first.get_submodule(owner)._buffers[leaf] = buffer.detach().clone()
        self._local = threading.local()
        self._local.module = self._first

    def get(self) -> nn.Module:
        if not hasattr(self._local, "module"):
            self._local.module = copy.deepcopy(self._first)
        return self._local.module


def _hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device, tied ones still tied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _own_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Dotted name -> parameter, detached; a tied parameter is one tensor under several names."""
    detached: dict[int, torch.Tensor] = {}
    return {
        name: detached.setdefault(id(parameter), parameter.detach())
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _nest(named: dict[str, torch.Tensor]) -> Tree:
    """``{"h.0.weight": ...}`` -> ``{"h": [{"weight": ...}]}``; keys 0..n-1 make a list."""
    tree: dict[str, Any] = {}
    for name, tensor in named.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = tensor
    return _lists(tree)


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    values = {key: _lists(value) for key, value in node.items()}
    if list(values) == [str(index) for index in range(len(values))]:
        return list(values.values())
    return values


def _flat(tree: Tree, prefix: str = "") -> dict[str, torch.Tensor]:
    """The inverse of `_nest`."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _initialise(hollow: nn.Module) -> Tree:
    """Make a meta module's parameters by each submodule's own ``reset_parameters``."""
    module = copy.deepcopy(hollow)
    _resettable(module, lambda owner: any(True for _ in owner.parameters(recurse=False)), "parameters")
    _empty_parameters(module)
    for owner in module.modules():
        if callable(getattr(owner, "reset_parameters", None)):
            owner.reset_parameters()  # type: ignore[operator]
    return _nest(_own_parameters(module))


def _empty_parameters(module: nn.Module) -> None:
    """Memory for a meta module's parameters, tied ones still tied. (Module.to_empty cannot while being recorded.)"""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in owner.named_parameters(recurse=False, remove_duplicate=False):
            if old not in made:
                made[old] = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
            setattr(owner, name, made[old])


def _reset_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Real values for a meta module's buffers, by ``reset_parameters`` of the submodules that own some."""

    def owns(owner: nn.Module) -> bool:
        return any(buffer.is_meta for buffer in owner.buffers(recurse=False))

    _resettable(module, owns, "buffers")
    found = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    for prefix, owner in module.named_modules():
        if owns(owner):
            real = copy.deepcopy(owner).to_empty(device="cpu", recurse=False)
            real.reset_parameters()
            found |= {f"{prefix}.{name}" if prefix else name: b for name, b in real.named_buffers(recurse=False)}
    return found


def _resettable(module: nn.Module, owns: Callable[[nn.Module], bool], what: str) -> None:
    missing = [
        f"{name or '(top)'}: {type(owner).__name__}"
        for name, owner in module.named_modules()
        if owns(owner) and not callable(getattr(owner, "reset_parameters", None))
    ]
    if missing:
        raise TreeError(
            f"submodules with {what} on the meta device and no reset_parameters() to make them:\n{listing(missing)}\nGive "
            "them one, or pass sl.shard a function that builds the module on the CPU: lambda: sl.from_module(Model())[1]"
        )


def _refuse_frozen(module: nn.Module) -> None:
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise TreeError(
            f"{len(frozen)} parameters have requires_grad=False, which a pytree of tensors cannot carry:\n"
            f"{listing(frozen)}\nCall module.requires_grad_(True) and say which to freeze in the plan: sl.freeze([...])"
        )

"""Values for a module on the meta device, by its submodules' own ``reset_parameters``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from shardlib.errors import TreeError, listing


def initialised(hollow: nn.Module) -> nn.Module:
    """A copy of a meta module with parameters, made by each submodule's own ``reset_parameters``.

    Raises:
        TreeError: submodules with parameters and without ``reset_parameters``; lists all.
    """
    module = copy.deepcopy(hollow)
    _resettable(module, lambda owner: any(True for _ in owner.parameters(recurse=False)), "parameters")
    _empty(module)
    for owner in module.modules():
        if callable(getattr(owner, "reset_parameters", None)):
            owner.reset_parameters()  # type: ignore[operator]
    return module


def _empty(module: nn.Module) -> None:
    """Memory for a meta module's parameters, tied ones still tied. (Module.to_empty cannot while being recorded.)"""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in owner.named_parameters(recurse=False, remove_duplicate=False):
            if old not in made:
                made[old] = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
            setattr(owner, name, made[old])


def reset_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Real values for a meta module's buffers, by ``reset_parameters`` of the submodules that own some.

    Raises:
        TreeError: submodules with buffers and without ``reset_parameters``; lists all.
    """

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

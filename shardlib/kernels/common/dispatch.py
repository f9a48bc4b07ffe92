"""Which implementation of an operation serves a device; chosen once.

An implementation is a module of the operation's folder with the operation's functions, whose many arguments are records
that the folder's `arguments` states once, and with `load`, which makes it ready and returns its name, or raises where it
cannot be used here. The folder's `op` says which there are, in
``IMPLEMENTATIONS``: the type of device -> modules, the preferred first. The module ``reference`` comes after all and
serves everything; one named ``torch`` calls functions of torch that a kernel here would not beat. One that holds rows in
registers says in ``WIDEST`` how many columns those may have.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shardlib.kernels.common.build import BuildError

_log = logging.getLogger("shardlib.kernels")
_lock = threading.Lock()
_told: set[str] = set()


class Choice(NamedTuple):
    """An implementation that is ready, its name, and why those before it were passed over."""

    module: Any
    name: str
    passed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.passed)})" if self.passed else self.name


def operations() -> list[str]:
    """The names of all operations: the folders of `shardlib.kernels` that have one."""
    return sorted(found.parent.name for found in Path(__file__).parents[1].glob("*/op.py"))


def choose(operation: str, device: torch.device) -> Choice:
    """What serves ``device``; logs it the first time, as a warning where only plain torch is left."""
    with _lock:
        return _choose(operation, device.type)


def load(operation: str, implementation: str, device: torch.device) -> Choice:
    """One implementation by the name of its module, for tests and benchmarks; raises where it cannot be used."""
    module = _module(operation, implementation)
    return Choice(module, module.load(device), ())


def serving(operation: str, computed: torch.Tensor, using: str | None = None) -> Any:
    """The module that computes in the dtype, on the device and in the width of ``computed``.

    Args:
        using: the name of one, for tests and benchmarks; otherwise what `choose` prefers.

    Raises:
        TypeError: one was named, and it does not compute in float64: only the reference does.
        ValueError: one was named, and its rows cannot be that wide.
    """
    if computed.dtype == torch.float64:
        if using not in (None, "reference"):
            raise TypeError(f"float64 is served by plain torch, not by {using}")
        return _module(operation, "reference")
    choice = choose(operation, computed.device) if using is None else load(operation, using, computed.device)
    widest = getattr(choice.module, "WIDEST", None)
    if widest is None or computed.shape[-1] <= widest:
        return choice.module
    reason = f"{operation}: rows of {computed.shape[-1]}, and {choice.name} takes {widest} at most"
    if using is not None:
        raise ValueError(f"{reason}; use 'reference'")
    _warn(operation, f"{reason}; plain torch serves, several times slower")
    return _module(operation, "reference")


@functools.cache
def _choose(operation: str, device: str) -> Choice:
    passed: list[str] = []
    for implementation in (*_module(operation, "op").IMPLEMENTATIONS.get(device, ()), "reference"):
        try:
            choice = load(operation, implementation, torch.device(device))
        except (BuildError, ImportError, OSError) as reason:
            passed.append(f"not {implementation}: {reason}")
            continue
        choice = choice._replace(passed=tuple(passed))
        _tell(operation, device, choice, implementation == "reference")
        return choice
    raise AssertionError("the reference can always be used")


def _tell(operation: str, device: str, choice: Choice, slow: bool) -> None:
    _log.info("%s on %s: %s", operation, device, choice)
    reasons = "; ".join(choice.passed)
    if slow and reasons:  # the other operations lack the same compiler, or the same folder
        message = f"compiled kernels are not used on {device}, plain torch is, several times slower: {reasons}"
        _warn(device, f"{message}; `shardlib doctor` says which")


def _warn(about: str, message: str) -> None:
    """Once about a device or an operation, whatever differs from one time to the next; and not on every rank."""
    if about not in _told and os.environ.get("RANK", "0") == "0":
        _told.add(about)
        _log.warning(message)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where kernels are launched for tensors of ``device``: on its GPU, even if another is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _module(operation: str, implementation: str) -> ModuleType:
    return importlib.import_module(f"shardlib.kernels.{operation}.{implementation}")

"""The choice of the implementation of an operation for a device, made once.

An implementation is a namespace of functions: a class in the operation's package (``reference``, ``cpu``, ``cuda``), or a
module of it, imported where it serves (``triton``). Each has the operation's functions, with the same arguments, and `load`,
which prepares the implementation and returns its name, or raises where it cannot be used. ``IMPLEMENTATIONS`` in the package
lists them: type of device -> names, the preferred first. ``reference``, plain torch, comes last and supports every input. An
implementation that holds a row in registers states in ``WIDEST`` how many columns fit.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shardlib.kernels.common.build import BuildError

_WRITTEN_IN = {"cpu": "C++", "cuda": "CUDA", "triton": "Triton"}  # implementations, for messages
_log = logging.getLogger("shardlib.kernels")
_lock = threading.Lock()
_chosen: dict[tuple[str, str], ReadyImplementation] = {}  # by operation and type of device
_warned: set[str] = set()
_NOTHING = contextlib.nullcontext()


class Plain:
    """The base of an operation's ``reference``."""

    @classmethod
    def load(cls, device: torch.device) -> str:
        return "reference"


class ReadyImplementation(NamedTuple):
    """An implementation that is ready.

    Attributes:
        implementation: its namespace.
        name: as users read it, such as "C++, avx2".
        passed: why each implementation that is preferred to this one cannot be used.
    """

    implementation: Any
    name: str
    passed: tuple[str, ...]

    def __str__(self) -> str:
        name = "plain torch" if self.name == "reference" else self.name
        return f"{name} ({'; '.join(self.passed)})" if self.passed else name


def operations() -> list[str]:
    """The names of all operations: the packages of `shardlib.kernels` beside this one."""
    here = Path(__file__).parent
    return sorted(path.parent.name for path in here.parent.glob("*/__init__.py") if path.parent != here)


def choose(operation: str, device: torch.device) -> ReadyImplementation:
    """The preferred implementation on ``device``; logged the first time, as a warning where it is plain torch."""
    known = _chosen.get((operation, device.type))  # asked in every call of a kernel
    if known is None:
        with _lock:
            known = _chosen.setdefault((operation, device.type), _choose(operation, device.type))
    return known


def preferred(operation: str, device: torch.device) -> str:
    """The name of the implementation that `choose` tries first."""
    return _in_order(operation, device.type)[0]


def load(operation: str, implementation: str, device: torch.device) -> ReadyImplementation:
    """One implementation by its name, for tests and benchmarks; raises where it cannot be used."""
    found = _implementation(operation, implementation)
    return ReadyImplementation(found, found.load(device), ())


def serving(operation: str, x: torch.Tensor, using: str | None = None) -> Any:
    """The implementation that computes in the dtype, on the device and with the row width of ``x``.

    Args:
        using: names an implementation, for tests and benchmarks; None takes what `choose` prefers.

    Raises:
        TypeError: ``x`` is float64, and ``using`` names another implementation than the reference.
        ValueError: the rows of ``x`` are too wide for the implementation that ``using`` names.
    """
    if x.dtype == torch.float64:
        if using not in (None, "reference"):
            raise TypeError(f"float64 is served by plain torch, not by {using}")
        return _implementation(operation, "reference")
    choice = choose(operation, x.device) if using is None else load(operation, using, x.device)
    widest = getattr(choice.implementation, "WIDEST", None)
    if widest is None or x.shape[-1] <= widest:
        return choice.implementation
    reason = f"{operation}: rows of {x.shape[-1]}, and {choice.name} takes {widest} at most"
    if using is not None:
        raise ValueError(f"{reason}; use 'reference'")
    _warn(operation, f"{reason}; plain torch serves, several times slower")
    return _implementation(operation, "reference")


def _choose(operation: str, device: str) -> ReadyImplementation:
    passed: list[str] = []
    for implementation in _in_order(operation, device):
        try:
            choice = load(operation, implementation, torch.device(device))
        except (BuildError, ImportError, OSError) as reason:
            passed.append(f"no {_WRITTEN_IN.get(implementation, implementation)}: {reason}")
            continue
        choice = choice._replace(passed=tuple(passed))
        _log_choice(operation, device, choice, implementation == "reference")
        return choice
    raise AssertionError("the reference can always be used")


def _in_order(operation: str, device: str) -> tuple[str, ...]:
    return (*_package(operation).IMPLEMENTATIONS.get(device, ()), "reference")


def _log_choice(operation: str, device: str, choice: ReadyImplementation, slow: bool) -> None:
    _log.info("%s on %s: %s", operation, device, choice)
    reasons = "; ".join(choice.passed)
    if slow and reasons:  # one warning per device: other operations fail for the same compiler or folder
        message = f"compiled kernels are not used on {device}, plain torch is, several times slower: {reasons}"
        _warn(device, f"{message}; `shardlib doctor` says which")


def _warn(subject: str, message: str) -> None:
    """Logs one warning per subject (a device or an operation), on rank 0 alone."""
    if subject not in _warned and os.environ.get("RANK", "0") == "0":
        _warned.add(subject)
        _log.warning(message)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on the GPU ``device``, whichever GPU is current."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def _implementation(operation: str, name: str) -> Any:
    package = _package(operation)
    found = getattr(package, name, None)
    return importlib.import_module(f"{package.__name__}.{name}") if found is None else found


def _package(operation: str) -> ModuleType:
    return importlib.import_module(f"shardlib.kernels.{operation}")

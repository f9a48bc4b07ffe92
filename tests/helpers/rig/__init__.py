"""A device of torch's to test with, on a machine that has none: ``import rig; rig.start()``, then ``torch.device("rig")``.

Its memory is its own: a budget, past which `torch.OutOfMemoryError` is raised; what the host reads of it ends the process;
what was not written, or was freed, is NaN. Copies to and from it are counted, and take the time that the links' rates say.
With ``non_blocking``, to or from pinned memory, they run behind, on the current stream: without a wait the numbers are wrong.
Everything else runs on the host's kernels in the caller's thread.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch.utils import cpp_extension

from shardlib.kernels.common.build import Recipe, shared_library

_HERE = Path(__file__).parent


class Counts(NamedTuple):
    """What the device has counted since `reset`, in bytes and copies.

    ``live`` and ``peak``: bytes of the device's memory; ``pinned``, ``pinned_peak``: of pinned memory; ``up`` and ``down``:
    bytes copied to the device and from it, in ``ups`` and ``downs`` copies; ``host``, ``host_peak``: bytes of host memory
    that torch has taken since `start`, or that was pinned.
    """

    live: int
    peak: int
    pinned: int
    pinned_peak: int
    up: int
    down: int
    ups: int
    downs: int
    host: int
    host_peak: int


class Entry(ctypes.Structure):
    """What happened from ``begin`` to ``end``, in seconds of `time.monotonic`.

    ``kind``: "memory", of which ``bytes`` were then in use; or "up" or "down", a copy of ``bytes``.
    """

    _fields_: ClassVar = [
        ("_kind", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
    ]

    @property
    def kind(self) -> str:
        return ("memory", "up", "down")[self._kind]


@functools.cache
def start() -> None:
    """Build the device if it is not there, and register it with torch under the name "rig"."""
    library = _library()
    library.rig_start()
    torch.utils.rename_privateuse1_backend("rig")
    torch._register_device_module("rig", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.empty(0, pin_memory=True)  # before the first such call torch takes no memory for pinned


def counts() -> Counts:
    """What the device has counted."""
    return Counts(*map(_library().rig_count, range(len(Counts._fields))))


def reset() -> None:
    """Wait for the device, then count from here."""
    _library().rig_reset()


@contextmanager
def limits(budget: int = 0, up: float = 0.0, down: float = 0.0, host: int = 0) -> Iterator[None]:
    """Budgets of the device's memory and of the host's (see `Counts`) in bytes, and the links' rates in bytes per second; 0
    for none. With a rate below 0 a copy that runs behind takes until somebody waits for it."""
    library = _library()
    library.rig_set_budgets(budget, host)
    library.rig_set_rates(up, down)
    try:
        yield
    finally:
        library.rig_set_budgets(0, 0)
        library.rig_set_rates(0.0, 0.0)


@contextmanager
def recorded() -> Iterator[list[Entry]]:
    """A list that holds all that happened in the context, once it has ended."""
    library, entries = _library(), list[Entry]()
    library.rig_record(True)
    try:
        yield entries
    finally:
        library.rig_record(False)
        for number in range(library.rig_recorded()):
            entries.append(Entry())
            library.rig_entry(number, ctypes.byref(entries[-1]))


@functools.cache
def _library() -> ctypes.CDLL:
    folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    binaries = cpp_extension.TORCH_LIB_PATH
    recipe = Recipe(
        name="rig",
        compiler="g++",
        units=tuple((_HERE / name, ()) for name in ("device.cpp", "operators.cpp")),
        includes=tuple(sorted(_HERE.glob("*.h"))),
        flags=(
            "-std=c++20", "-O0", "-fPIC", "-w", *folders,
            f"-L{binaries}", f"-Wl,-rpath,{binaries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10",
        ),
    )  # fmt: skip
    path = shared_library(recipe)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.rig_count.restype = ctypes.c_int64
    library.rig_set_budgets.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.rig_record.argtypes = [ctypes.c_bool]
    library.rig_recorded.restype = ctypes.c_int64
    library.rig_entry.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.rig_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.rig_unpin.argtypes = [ctypes.c_void_p]
    library.rig_set_rates.argtypes = [ctypes.c_double, ctypes.c_double]
    return library


def _module() -> types.ModuleType:
    """What torch looks up under ``torch.rig``, and what the library looks up as it does under ``torch.cuda``."""
    library = _library()
    module = types.ModuleType("torch.rig")
    generator = torch.ops.rig.default_generator()
    facts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": (generator,),
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=0: generator.get_state(),
        "set_rng_state": lambda state, device=0: generator.set_state(state),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "synchronize": torch.accelerator.synchronize,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "cudart": lambda: types.SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: library.rig_pin(address, size),
            cudaHostUnregister=library.rig_unpin,
        ),
    }
    for name, fact in facts.items():
        setattr(module, name, fact)
    return module

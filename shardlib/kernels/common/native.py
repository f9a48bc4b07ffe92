"""Compiled kernels as Python functions: C functions over raw pointers, called through ctypes.

They need no header of torch, so a kernel compiles in seconds and one library works with every version of torch.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common.build import BuildError, Recipe, compiles, shared_library

_COMMON = Path(__file__).parent
_OPERATIONS = _COMMON.parent
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# bf16 products by AMX, for the kernels in _WITH_AMX, if the compiler and its assembler compile this function.
_AMX = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_AMX_SOURCE = """bool amx() {
    asm volatile("tilezero %tmm0");
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16");
}
"""
_WITH_AMX = ("sparse_attention", "grouped_matmul", "thin_matmul", "decoder_attention", "decoder_mlp")
# Sums keep the order in which they are written, and products are rounded before they are added: the same bits everywhere.
_EXACT = ("-ffp-contract=off", "-fno-math-errno")
_loaded: dict[tuple[str, str | Path], Any] = {}  # (operation, instruction set or library) -> its functions


def functions(path: Path, signatures: Mapping[str, str], suffix: str = "", checked: bool = False) -> Any:
    """The functions of a compiled library, as attributes.

    Args:
        path: the shared library.
        signatures: function -> one letter per parameter: p a tensor (or None), i an int, l an int64, f a float.
        suffix: of the functions' names in the library.
        checked: whether the functions return an error code, 0 for success; otherwise they return nothing.
    """
    library = ctypes.CDLL(str(path))
    return SimpleNamespace(
        **{name: _callable(getattr(library, name + suffix), letters, checked) for name, letters in signatures.items()}
    )


def _callable(function: Any, letters: str, checked: bool) -> Callable[..., None]:
    function.argtypes = [_TYPES[letter] for letter in letters]
    function.restype = ctypes.c_int if checked else None
    pointers = [at for at, letter in enumerate(letters) if letter == "p"]

    def call(*values: torch.Tensor | int | float | None) -> None:
        given: list[Any] = list(values)
        for at in pointers:  # alone, as a call of a kernel on few numbers takes microseconds
            if isinstance(given[at], torch.Tensor):
                given[at] = given[at].data_ptr()
        code = function(*given)
        if code:
            raise RuntimeError(f"{function.__name__} was not launched: CUDA error {code}; see cudaError_t")

    return call


def cpp_recipe(name: str) -> Recipe:
    """``<name>/<name>.cpp``, compiled once per instruction set of this architecture that the compiler supports."""
    source = _OPERATIONS / name / f"{name}.cpp"
    amx = _can_use_amx(name) and _compiles_amx()
    chooses = ("-DISA=portable", "-DCHOOSES", *(("-DHAS_AMX",) if amx else ()))
    units: list[tuple[Path, tuple[str, ...]]] = [(source, chooses)]
    if platform.machine() in ("x86_64", "AMD64"):
        # All processors with AVX2 also have F16C and FMA.
        units += [(source, ("-DISA=avx2", "-mavx2", "-mf16c", "-mfma")), (source, ("-DISA=avx512", *_AVX512))]
    if amx:
        units.append((source, ("-DISA=amx", *_AVX512, *_AMX)))
    flags = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi", *_EXACT)
    headers = (*sorted(_COMMON.glob("*.h")), *sorted(source.parent.glob("*.h")))
    return Recipe(name, "g++", tuple(units), headers, flags)


def _can_use_amx(name: str) -> bool:
    return name in _WITH_AMX and platform.system() == "Linux" and platform.machine() == "x86_64"


def _compiles_amx() -> bool:
    return compiles("g++", _AMX_SOURCE, _AMX)


@functools.cache
def cpp_path(name: str) -> Path:
    """The path of the operation's library for the CPU, built on the first call.

    Raises:
        BuildError: the library cannot be built here.
    """
    return shared_library(cpp_recipe(name))


@functools.cache
def instruction_set(name: str) -> str:
    """The best instruction set that both the library and this processor have: "amx", "avx512", "avx2" or "portable"."""
    function = ctypes.CDLL(str(cpp_path(name))).instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()


def description(name: str) -> str:
    """The instruction set in use, and whether the compiler left AMX out; for ``shardlib doctor``."""
    without_amx = _can_use_amx(name) and not _compiles_amx()
    remark = " (without AMX, which this compiler does not support; GCC 11 and later do)" if without_amx else ""
    return f"C++, {instruction_set(name)}{remark}"


def cpp_functions(name: str, signatures: Mapping[str, str]) -> Any:
    """The operation's functions for this processor; see `functions`. ``signatures`` must be the same in every call."""
    chosen = instruction_set(name)
    loaded = _loaded.get((name, chosen))
    if loaded is None:
        loaded = _loaded[name, chosen] = functions(cpp_path(name), signatures, "_" + chosen)
    return loaded


def cuda_functions(name: str, signatures: Mapping[str, str]) -> Any:
    """The operation's functions for the GPUs of this machine; they raise where a launch fails. See `cpp_functions`."""
    path = cuda_path(name)
    loaded = _loaded.get((name, path))
    if loaded is None:
        loaded = _loaded[name, path] = functions(path, signatures, checked=True)
    return loaded


class Compiled:
    """The base of an operation's ``cpu`` and ``cuda``, whose functions call those of ``<operation>.cpp`` and ``.cu``.

    ``class cpu(Compiled, gelu="pipillpi")`` gives the signature of each C function; see `functions`. Those of ``cuda(cpu)``
    are the same, but for the last argument.
    """

    of_gpus: bool = False
    operation: str
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **signatures: str) -> None:
        cls.operation, cls.of_gpus = cls.__module__.rpartition(".")[2], cls.__name__ == "cuda"
        cls.signatures = signatures or {name: letters[:-1] + "p" for name, letters in cls.signatures.items()}

    @classmethod
    def load(cls, device: torch.device) -> str:
        if not cls.of_gpus:
            return description(cls.operation)
        cls.library()
        return "CUDA C++"

    @classmethod
    def library(cls) -> Any:
        """The C functions, as attributes."""
        return (cuda_functions if cls.of_gpus else cpp_functions)(cls.operation, cls.signatures)

    @classmethod
    def runs_on(cls, device: torch.device) -> int:
        """The last argument of functions: a stream, or a number of threads."""
        return stream(device) if cls.of_gpus else threads()


def cuda_recipe(name: str, capability: tuple[int, int]) -> Recipe:
    """``<name>/<name>.cu`` for GPUs of one compute capability, and for later ones by its PTX."""
    flags = ("-O3", "-std=c++17", f"-arch=sm_{capability[0]}{capability[1]}", "-Xcompiler=-fPIC", "-fmad=false")
    units, includes = ((_OPERATIONS / name / f"{name}.cu", ()),), tuple(sorted(_COMMON.glob("*.cuh")))
    return Recipe(f"{name}-cuda", "nvcc", units, includes, flags)


@functools.cache
def cuda_path(name: str) -> Path:
    """The path of the operation's library for the GPUs of this machine, built on the first call.

    Raises:
        BuildError: the library cannot be built here, or there is no NVIDIA GPU.
    """
    return shared_library(cuda_recipe(name, _capability()))


def _capability() -> tuple[int, int]:
    """The least compute capability of the GPUs of this machine."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise BuildError("no NVIDIA GPU that this torch can use")
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def recipe_of(name: str, implementation: str) -> Recipe | None:
    """What an operation's implementation is compiled from before its first call; None of Triton and torch's own.

    Raises:
        BuildError: the compiler is missing, or there is no NVIDIA GPU.
    """
    if implementation == "cpu":
        return cpp_recipe(name)
    has_source = implementation == "cuda" and (_OPERATIONS / name / f"{name}.cu").exists()
    return cuda_recipe(name, _capability()) if has_source else None


def stream(device: torch.device) -> int:
    """The handle of torch's current stream on ``device``."""
    return torch.cuda.current_stream(device).cuda_stream


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as compiled kernels read it: contiguous, fp32 or bf16; fp16 is cast to fp32."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()


def floats(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` in contiguous fp32: how compiled kernels read small tensors, such as a norm's weight."""
    return None if x is None else (x if x.dtype == torch.float32 else x.float()).contiguous()


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

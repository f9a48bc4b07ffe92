"""Compiled kernels as Python functions: C functions over raw pointers, called through ctypes.

No header of torch is needed, so that a kernel compiles in seconds and one library serves every version of torch.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardlib.kernels.common.build import BuildError, Recipe, compiles, shared_library

_COMMON = Path(__file__).parent
_OPERATIONS = _COMMON.parent
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# bf16 by AMX; compiled for kernels of small products alone, where the compiler and its assembler know what these need.
_AMX = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_NEEDS_OF_AMX = """bool amx() {
    asm volatile("tilezero %tmm0");
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16");
}
"""
_WITH_AMX = ("sparse_attention",)
# Sums are in the order written, and a product is rounded before it is added: the same bits everywhere.
_EXACT = ("-ffp-contract=off", "-fno-math-errno")
_loaded: dict[tuple[str, str | Path], Any] = {}  # by operation, and instruction set or library


def functions(path: Path, signatures: Mapping[str, str], suffix: str = "", checked: bool = False) -> Any:
    """The functions of a compiled library, as attributes.

    Args:
        path: the shared library.
        signatures: function -> its parameters' types, a letter each: p a tensor (or None), i an int, l an int64, f a float.
        suffix: what the library's names have after the functions'.
        checked: they return an int, 0 where all went well; otherwise nothing.
    """
    library = ctypes.CDLL(str(path))
    made = {name: _callable(getattr(library, name + suffix), letters, checked) for name, letters in signatures.items()}
    return SimpleNamespace(**made)


def _callable(function: Any, letters: str, checked: bool) -> Callable[..., None]:
    function.argtypes = [_TYPES[letter] for letter in letters]
    function.restype = ctypes.c_int if checked else None

    def call(*values: torch.Tensor | int | float | None) -> None:
        code = function(*[value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values])
        if code:
            raise RuntimeError(f"{function.__name__} was not launched: CUDA error {code}; see cudaError_t")

    return call


def cpp_recipe(name: str) -> Recipe:
    """``<name>/<name>.cpp`` compiled for every instruction set of this kind of processor that the compiler knows."""
    source = _OPERATIONS / name / f"{name}.cpp"
    amx = _suits_amx(name) and _knows_amx()
    chooses = ("-DISA=portable", "-DCHOOSES", *(("-DHAS_AMX",) if amx else ()))
    units: list[tuple[Path, tuple[str, ...]]] = [(source, chooses)]
    if platform.machine() in ("x86_64", "AMD64"):
        # All processors with AVX2 convert halves, and multiply and add in one, too.
        units += [(source, ("-DISA=avx2", "-mavx2", "-mf16c", "-mfma")), (source, ("-DISA=avx512", *_AVX512))]
    if amx:
        units.append((source, ("-DISA=amx", *_AVX512, *_AMX)))
    flags = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi", *_EXACT)
    headers = (*sorted(_COMMON.glob("*.h")), *sorted(source.parent.glob("*.h")))
    return Recipe(name, "g++", tuple(units), headers, flags)


def _suits_amx(name: str) -> bool:
    return name in _WITH_AMX and platform.system() == "Linux" and platform.machine() == "x86_64"


def _knows_amx() -> bool:
    return compiles("g++", _NEEDS_OF_AMX, _AMX)


@functools.cache
def cpp_path(name: str) -> Path:
    """The operation's library for the CPU, built on the first call.

    Raises:
        BuildError: it cannot be built here.
    """
    return shared_library(cpp_recipe(name))


@functools.cache
def instruction_set(name: str) -> str:
    """The one of the library that suits this processor best: "amx", "avx512", "avx2" or "portable"."""
    function = ctypes.CDLL(str(cpp_path(name))).instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()


def description(name: str) -> str:
    """What `instruction_set` says, and what the compiler kept out of the library; for ``shardlib doctor``."""
    lacks = _suits_amx(name) and not _knows_amx()
    left_out = " (AMX left out, which the compiler does not know: GCC 11 and later do)" if lacks else ""
    return f"C++, {instruction_set(name)}{left_out}"


def cpp_functions(name: str, signatures: Mapping[str, str]) -> Any:
    """The operation's functions for this processor; see `functions`. ``signatures`` are the same at every call."""
    chosen = instruction_set(name)
    found = _loaded.get((name, chosen))
    if found is None:
        found = _loaded[name, chosen] = functions(cpp_path(name), signatures, "_" + chosen)
    return found


def cuda_functions(name: str, signatures: Mapping[str, str]) -> Any:
    """The operation's functions for the GPUs at hand, which tell whether they were launched; otherwise as `cpp_functions`."""
    path = cuda_path(name)
    found = _loaded.get((name, path))
    if found is None:
        found = _loaded[name, path] = functions(path, signatures, checked=True)
    return found


def cuda_recipe(name: str, capability: tuple[int, int]) -> Recipe:
    """``<name>/<name>.cu`` for GPUs of one compute capability, and by its PTX for later ones."""
    flags = ("-O3", "-std=c++17", f"-arch=sm_{capability[0]}{capability[1]}", "-Xcompiler=-fPIC", "-fmad=false")
    includes = (_OPERATIONS / name / f"{name}.cuh", *sorted(_COMMON.glob("*.cuh")))
    return Recipe(f"{name}-cuda", "nvcc", ((_OPERATIONS / name / f"{name}.cu", ()),), includes, flags)


@functools.cache
def cuda_path(name: str) -> Path:
    """The operation's library for the GPUs at hand, built on the first call.

    Raises:
        BuildError: it cannot be built here, or there is no NVIDIA GPU.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise BuildError("no NVIDIA GPU that this torch can use")
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return shared_library(cuda_recipe(name, min(capabilities)))


def stream(device: torch.device) -> int:
    """The handle of the stream that torch runs on now."""
    return torch.cuda.current_stream(device).cuda_stream


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the compiled kernels read it: contiguous fp32 or bf16; fp16 is cast first."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()


def floats(x: torch.Tensor | None) -> torch.Tensor | None:
    """Small tensors, such as weights of a norm, which compiled kernels read in fp32."""
    return None if x is None else x.float().contiguous()


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def copied(copy: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Where a step also writes the parameter, and in which of `DTYPES`; −1 for nowhere."""
    return copy, -1 if copy is None else DTYPES[copy.dtype]


def factor(scale: torch.Tensor | None) -> float:
    """What a step on the CPU multiplies the gradient by."""
    return 1.0 if scale is None else float(scale)

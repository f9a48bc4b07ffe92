"""Every Triton kernel compiles for sm_90, without a GPU, and does not spill registers."""

import importlib
import pkgutil
import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")
from helpers import gpu_cases
from helpers.gpu_compile import check, compiled
from triton.runtime.jit import JITFunction


@pytest.mark.parametrize("name", gpu_cases.CASES)
def test_a_kernel_fits(name, tmp_path):
    check(gpu_cases.CASES[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", gpu_cases.MORE)
def test_a_kernel_fits_in_every_shape(name, tmp_path):
    check(gpu_cases.MORE[name], tmp_path)


def test_no_kernel_is_left_out():
    """Every kernel of the operations has a case. Functions that no other function calls are kernels."""
    listed = {case.kernel for case in gpu_cases.CASES.values()}
    functions = {}
    for operation in {kernel.fn.__module__.rpartition(".")[0] for kernel in listed}:
        for found in pkgutil.iter_modules(importlib.import_module(operation).__path__, f"{operation}."):
            if found.name.rpartition(".")[2].startswith("triton"):
                for value in vars(importlib.import_module(found.name)).values():
                    if isinstance(value, JITFunction):
                        functions[value.fn] = value
    sources = [value.src for value in functions.values()]
    kernels = {
        value
        for value in functions.values()
        if not any(re.search(rf"(?<![\w.]){value.__name__}\(", source.partition("(")[2]) for source in sources)
    }
    assert kernels == listed


@pytest.mark.parametrize("name", ["forward of 80 fp16, 64 × 64", "query of 80 fp16, 64 × 64"])
def test_positions_are_compared_for_every_element(name):
    """Triton 3.6 compared a sum of a number loaded ahead and a remainder once for 16 rows, which is wrong at the diagonal."""
    case = gpu_cases.CASES[f"sparse {name} by 16"]

    def comparisons(causal):
        made = compiled(replace(case, constants=case.constants | {"CAUSAL": causal}))
        return len(re.findall(r"setp\.[gl][et]\.s32", made.asm["ptx"]))

    of_a_thread = 64 * 64 // (32 * case.warps)
    assert comparisons(True) - comparisons(False) >= of_a_thread


def test_spilled_registers_are_noticed(tmp_path):
    """128 numbers of each of three tensors a thread."""
    case = gpu_cases.CASES["quantize 8 by 4096, sent 0, feedback=True"]
    with pytest.raises(AssertionError, match="STACK"):
        check(replace(case, warps=1), tmp_path)

"""Every Triton kernel compiles for sm_90, without a GPU, and holds what it works on in registers and shared memory."""

import importlib
import pkgutil
import re

import pytest

pytest.importorskip("triton")
from helpers import compiled
from triton.runtime.jit import JITFunction

import shardlib.kernels


@pytest.mark.parametrize("name", compiled.CASES)
def test_a_kernel_fits(name, tmp_path):
    compiled.check(compiled.CASES[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", compiled.MORE)
def test_a_kernel_fits_in_every_shape(name, tmp_path):
    compiled.check(compiled.MORE[name], tmp_path)


def test_no_kernel_is_left_out():
    """Functions that no other one calls are kernels."""
    functions = {}
    for found in pkgutil.walk_packages(shardlib.kernels.__path__, "shardlib.kernels."):
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
    assert kernels == {case.kernel for case in compiled.CASES.values()}


def test_what_is_spilled_is_noticed(tmp_path):
    case = next(case for name, case in compiled.CASES.items() if name.startswith("sparse forward of 128"))
    tight = compiled.Case(case.kernel, case.types, case.constants, warps=1, stages=case.stages, exact=False)
    with pytest.raises(AssertionError, match="STACK"):
        compiled.check(tight, tmp_path)

"""Implementations of kernels, and comparison of the communication kernels with their references.

As a script, `python kernels.py onebit|quantize`, it holds the Triton kernels to that: see `helpers.interpreter`.
"""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from shardlib.common import thresholds
from shardlib.kernels import onebit, quantize
from shardlib.kernels.common import native
from shardlib.kernels.common.build import Recipe, shared_library
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise

_HERE = Path(__file__).parent
INSTRUCTION_SETS = ("portable", "avx2", "avx512")
WITH_AMX = (*INSTRUCTION_SETS, "amx")  # of kernels that are compiled for it
CUT = "in three threads"  # all that a size decides, at small sizes
ON_CPU = (*INSTRUCTION_SETS, CUT)
IMPLEMENTATIONS = (*ON_CPU, "cuda on cpu")
SEGMENTS = {
    "tensors": Segments([0, 5, 5, 37, 1000, 7000, 7001, 9000], 9003),
    "blocks": Segments.blocks(128, 5000, 5120),
    "odd blocks": Segments.blocks(24, 5000, 5040),
    "small blocks": Segments.blocks(8, 95, 112),
    "one": Segments([0, 9000]),
    "across spans": Segments([0, 3, 65530, 65541, 140000], 140009),
    "one element": Segments([0, 1]),
    "empty": Segments([0]),
    "no elements": Segments([0, 0, 0]),
    "padding": Segments([0, 0], 17),
}


@contextlib.contextmanager
def served_by(name: str, dtype: torch.dtype | None = None):
    """The ``using`` that leads to an implementation: an instruction set, that of this processor with its work cut as that of
    large tensors is, the CUDA kernels run on the CPU, or the reference. None for float64, which has no other.
    """
    if name == "reference" or dtype == torch.float64:
        yield None if dtype == torch.float64 else name
        return
    if name == CUT:
        with threads(3), thresholds.small(16):
            yield "cpu"
        return
    if name == "cuda on cpu":
        with patch.object(native, "cuda_path", cuda_on_cpu), patch.object(native, "stream", lambda device: 0):
            yield "cuda"
        return
    best = native.instruction_set
    if WITH_AMX.index(name) > WITH_AMX.index(best("sparse_attention" if name == "amx" else "onebit")):
        pytest.skip(f"this processor has no {name}")

    def chosen(operation: str) -> str:
        return min(name, best(operation), key=WITH_AMX.index)  # not all are compiled for AMX

    with patch.object(native, "instruction_set", chosen):
        yield "cpu"


@contextlib.contextmanager
def threads(count: int):
    """Within, torch's number of threads, and so the compiled kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_threads_change_nothing(run, *counts: int, smallest: int | None = None) -> None:
    """``run()`` returns the same tensors in so many threads, with all that a size decides from ``smallest`` on."""
    results = []
    for count in counts:
        with threads(count), contextlib.nullcontext() if smallest is None else thresholds.small(smallest):
            results.append(run())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)


def cuda_on_cpu(name: str) -> Path:
    recipe = native.cuda_recipe(name, (9, 0))
    emulator = _HERE / "cuda_on_cpu.h"
    flags = ("-O2", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas")
    own = ("-x", "c++", "-include", str(emulator))
    units = tuple((source, own) for source, _ in recipe.units)
    return shared_library(Recipe(f"{name}-emulated", "g++", units, (*recipe.includes, emulator), flags))


def values(elements: int, seed: int) -> torch.Tensor:
    """Numbers of very different size, ties, zeros of both signs and denormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(elements, generator=generator)
    x *= torch.pow(10.0, torch.randint(-3, 4, (elements,), generator=generator))
    kind = torch.randint(0, 8, (elements,), generator=generator)
    for number, special in ((0, 0.0), (1, -0.0), (2, 0.5), (3, 1e-42)):
        x[kind == number] = special
    # Whole stretches of zeros and of denormals, that blocks may hold nothing else.
    if elements > 300:
        x[64:200] = 0.0
        x[200:300] = 3e-44
    return x


def check_onebit(using: str, segments: Segments, dtype: torch.dtype, seed: int, ranks: int = 3) -> None:
    """Every function against the reference, and errors against the scales that came with them."""
    x, error = values(segments.length, seed).to(dtype), values(segments.length, seed + 1) * 0.1
    wanted, found = error.clone(), error.clone()
    _same_onebit(
        onebit.compress(x, wanted, segments, using="reference"), wanted,
        onebit.compress(x, found, segments, using=using), found,
        x.float() + error, segments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (ranks, segments.bytes), generator=generator, dtype=torch.uint8)
    scales = torch.rand(ranks, segments.count, generator=generator)
    mean = onebit.average(bits, scales, segments, using="reference")
    assert torch.equal(onebit.average(bits, scales, segments, using=using), mean)
    one = onebit.decompress(bits[0], scales[0], segments, using=using)
    assert torch.equal(one.abs(), segments.spread(scales[0]))
    wanted, found = error.clone(), error.clone()
    _same_onebit(
        onebit.average_compress(bits, scales, wanted, segments, using="reference"), wanted,
        onebit.average_compress(bits, scales, found, segments, using=using), found,
        mean + error, segments,
    )  # fmt: skip


def _same_onebit(reference, wanted, result, found, c, segments) -> None:
    assert torch.equal(result[0], reference[0])
    torch.testing.assert_close(result[1], reference[1], rtol=1.2e-7, atol=0)  # one unit in the last place
    spread = segments.spread(result[1])
    left = torch.where(c >= 0, c - spread, c + spread)
    left[segments.elements :] = 0
    assert torch.equal(found, left)
    if torch.equal(result[1], reference[1]):
        assert torch.equal(found, wanted)


def check_quantize(using: str, elements: int, form: Blockwise, dtype: torch.dtype, seed: int, ranks: int = 3) -> None:
    """Every function against the reference, bit by bit."""
    x, error = values(elements, seed).to(dtype), values(elements, seed + 1) * 0.1
    for feedback in (False, True):
        wanted, found = (error.clone(), error.clone()) if feedback else (None, None)
        _same(quantize.quantize(x, form, wanted, using="reference"), quantize.quantize(x, form, found, using=using))
        _same([wanted] * feedback, [found] * feedback)
    sent = [quantize.quantize(values(elements, seed + r), form, using="reference") for r in range(ranks)]
    both = torch.stack([v for v, _ in sent]), torch.stack([s for _, s in sent])
    sums = [quantize.dequantize_sum(*both, form, elements, dtype=dtype, using=u) for u in ("reference", using)]
    # The interpreter's cast to bf16 truncates, and gets denormals wrong.
    truncates = using == "triton" and dtype == torch.bfloat16
    torch.testing.assert_close(sums[1], sums[0], rtol=2**-7 if truncates else 0, atol=2**-126 if truncates else 0)
    other = Blockwise(12 - form.bits, form.block)
    for feedback in (False, True):
        wanted, found = (error.clone(), error.clone()) if feedback else (None, None)
        first = quantize.dequantize_sum_quantize(*both, form, elements, other, wanted, using="reference")
        _same(first, quantize.dequantize_sum_quantize(*both, form, elements, other, found, using=using))
        _same([wanted] * feedback, [found] * feedback)


def _same(wanted, found) -> None:
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found):
        assert a.dtype == b.dtype and torch.equal(a, b)


def cubin_report(source: Path, folder: Path) -> str:
    """The report of ptxas on a .cu file compiled for sm_90; skips the test if there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    flags = ["-O3", "-std=c++17", "-arch=sm_90", "-fmad=false", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command = [nvcc, *flags, "-cubin", str(source), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "onebit":
        for name, segments in SEGMENTS.items():
            for dtype in (torch.float32, torch.bfloat16) if name == "tensors" else (torch.float32,):
                check_onebit("triton", segments, dtype, seed=7)
    else:
        for bits in (8, 4):
            for elements, block in ((0, 128), (1, 16), (5003, 16), (2049, 128), (4500, 4096)):
                check_quantize("triton", elements, Blockwise(bits, block), torch.float32, seed=7)
            check_quantize("triton", 1001, Blockwise(bits), torch.bfloat16, seed=7)
            check_quantize("triton", 1001, Blockwise(bits), torch.float16, seed=7)

"""Peak rates of a device, and the share that a kernel reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.harness import tables
from benchmarks.harness.case import CUDA, WRONG, Checks, Result, Setting
from benchmarks.harness.timing import medians
from shardlib.kernels.common.build import BuildError

Moving = tuple[float, Callable[[], Any]]  # bytes moved per element, and the operation
COPY = ("copy", "torch")
GPU_ROUNDS, GPU_WARM = 10, 4  # rounds that are counted, and rounds before them


def implementations(device: torch.device) -> tuple[str, ...]:
    """The names of a kernel's implementations on a device; some may not build there."""
    return ("cuda", "triton") if device.type == CUDA else ("cpu",)


def in_processes(check: Callable[[Any], tuple[str, str]], cases: Sequence[Any], device: torch.device) -> Checks:
    """The outcomes of checks. On a GPU processes share them, since most of their time goes into compiling kernels."""
    if device.type != CUDA:
        return [check(case) for case in cases]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
        return [*pool.map(check, cases)]


def outcome(good: bool, detail: str = "") -> str:
    """The text of a check's outcome."""
    return f"{'ok' if good else WRONG}{detail and f' ({detail})'}"


def tried(check: Callable[[], str]) -> str:
    """The text that ``check`` returns, or why its kernel cannot be built here."""
    try:
        return check()
    except (BuildError, ImportError) as reason:
        return f"not available: {reason}"


def bandwidths(title: str, calls: dict[tuple[str, str], Moving], elements: int, setting: Setting) -> Result:
    """Bytes per second of (kernel, implementation), taking turns; one of them is `COPY`.

    Those that cannot be built here are left out: the checks say why.
    """
    left: dict[tuple[str, str], Moving] = {}
    for key, (size, call) in calls.items():
        with suppress(BuildError, ImportError):
            call()
            left[key] = size, call
    times = setting.time(
        {", ".join(key): lambda _, call=call: call() for key, (_, call) in left.items()}, warm=GPU_WARM
    )
    taken = medians(times)
    ceiling = left[COPY][0] * elements / taken[", ".join(COPY)]
    cells = []
    for (name, using), (size, _) in left.items():
        seconds = taken[f"{name}, {using}"]
        rate = size * elements / seconds
        cells.append([name, using, f"{seconds * 1e3:.3f}", f"{rate / 1e9:.0f}", f"{rate / ceiling:.0%}"])
    about = f"{elements:,} elements, {setting.rounds} rounds."
    return tables.listed(title, about, ["kernel", "implementation", "ms", "GB/s", "of a copy's"], cells, times)


def product_rate(setting: Setting) -> float:
    """Operations per second of a large product of bf16 matrices: the device's peak."""
    side = 256 if setting.small else 8192
    a, b = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / medians(setting.time({"product": lambda _: a @ b}, warm=GPU_WARM))["product"]

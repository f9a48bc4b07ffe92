"""The host's time for a call of each operation of a layer, on tensors so small that nothing else counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases.layer_kernels import passes
from benchmarks.cases.layer_operations import Sizes, operations
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, CUDA, Case, Result, Setting
from benchmarks.harness.timing import Times, interleave, medians, one_thread, processor

_SIZES = Sizes(8, 16, 16, 2, 4, 2, 1, (8, 16, 32), 0.1)
_CALLS = 200  # in a sample, after which a GPU has done its part too
_COLUMNS = ("forward", "forward and backward")


def measure(setting: Setting) -> Result:
    """Processor time of calls by kernels and by eager torch, in turns."""
    times, cells = Times(), []
    calls = 4 if setting.small else _CALLS
    with one_thread():
        for name, operation in operations(_SIZES, torch.float32, setting.device).items():
            ways = {
                f"{whose}, {which}": _repeated(call, calls)
                for whose, function in (("kernel", operation.kernel), ("torch", operation.plain))
                for which, call in passes(function, operation).items()
            }
            taken = interleave(ways, setting.rounds, warm=1, stopwatch=processor)
            times |= {f"{name}, {way}": [each / calls for each in seconds] for way, seconds in taken.items()}
            found = {way: seconds / calls * 1e6 for way, seconds in medians(taken).items()}
            cells.append([name, *(f"{found[f'{w}, {which}']:.1f}" for which in _COLUMNS for w in ("kernel", "torch"))])
    about = (
        f"{_SIZES.tokens} rows of {_SIZES.width} in fp32, one thread: microseconds of processor time of a call by the "
        f"library's kernel and by operations of eager torch, means over {calls} calls, medians of {setting.rounds} rounds."
    )
    columns = ["operation", *(f"{which}: {whose}" for which in _COLUMNS for whose in ("kernel", "eager torch"))]
    return tables.listed("The host's time for small tensors", about, columns, cells, times)


def _repeated(call: Callable[[int], Any], calls: int) -> Callable[[int], None]:
    def repeated(number: int) -> None:
        for _ in range(calls):
            call(number)

    return repeated


CASE = Case("host_time", "the host's time for a call of each operation of a layer", {CPU: 15, CUDA: 5}, measure)

"""Calls on one device timed in turns, and what becomes of it: medians, and the raw seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import write_rows
from shardlib.kernels.common.build import BuildError

Rows = list[dict[str, str]]
_WARM, _ROUNDS = 4, 10


class Timing:
    """``tiny`` tries calls twice: its figures mean nothing."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self._raw: list[tuple[str, str, int, float]] = []

    def medians(self, table: str, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of each call, which take turns round by round. Those that cannot be built here are left out."""
        left, times = dict(calls), {name: list[float]() for name in calls}
        for number in range(2 if self.tiny else _WARM + _ROUNDS):
            for name, call in list(left.items()):
                try:
                    taken = self._seconds(call)
                except (BuildError, ImportError):
                    del left[name]  # the checks say why
                    continue
                if self.tiny or number >= _WARM:
                    times[name].append(taken)
                    self._raw.append((table, name, len(times[name]), taken))
        return {name: statistics.median(times[name]) for name in left}

    def _seconds(self, call: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def product_rate(self) -> float:
        """Operations per second of a large product of matrices in bf16: what the processor can do."""
        side = 256 if self.tiny else 8192
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * side**3 / self.medians("a product of matrices", {"torch": lambda: a @ b})["torch"]

    def write(self, file: Path) -> None:
        """The raw seconds as CSV."""
        rows = ((*row[:3], f"{row[3]:.9f}") for row in self._raw)
        write_rows(file, ["table", "call", "round", "seconds"], rows)

"""The floating-point operations per second that a device reaches at best."""

from __future__ import annotations

import time
from functools import cache

import torch

_SIDES = (1024, 2048, 4096, 8192)  # of the matrices: the first that keeps the device for long enough
_LONG = 5e-3  # seconds
_ROUNDS = 5


def measure_peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of large products of matrices, with torch's present number of threads.

    Matrices of 1,024 rows, and twice as many while a product takes less than 5 ms, up to 8,192.

    The best of some rounds, measured once in a process for each device, dtype and number of threads.

    >>> sl.report.measure_peak() > 0
    True
    """
    return _measured(torch.device(device), dtype, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    best = 0.0
    for side in _SIDES:
        seconds = _seconds(side, device, dtype)
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG:
            break
    return best


def _seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the quickest of some products."""
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(_ROUNDS + 1):
        _settle(device)
        start = time.perf_counter()
        a @ b
        _settle(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

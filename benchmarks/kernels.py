"""The communication kernels on one core: against eager torch, and against the bandwidth for the bytes they must move."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import Row, Section
from benchmarks.timing import interleave, ratio
from shardlib.kernels import onebit, quantize
from shardlib.kernels.common import dispatch
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise

_ELEMENTS = 1 << 25
# What the bandwidth is measured by, with its bytes per element: in place, as the kernels with errors work, or not, where
# the processor reads what it is about to overwrite.
_IN_PLACE, _COPY = ("error += x", 12), ("copy", 8)
_EAGER_ONEBIT, _LEAN_ONEBIT = "1-bit, DeepSpeed's operations in torch", "1-bit, fewest operations in torch"
_EAGER_QUANTIZE = "int8, eager torch"
_FASTER, _SHARE = 0.1, 1 / 0.7


class _Kernel(NamedTuple):
    bytes: float  # that it must move, per element
    run: Callable[[int], Any]
    like: tuple[str, int]
    eager: Mapping[str, float | None] = {}  # against which others, and the ratio aimed for


def measure(rounds: int) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, error, out = torch.randn(_ELEMENTS, generator=generator), torch.zeros(_ELEMENTS), torch.empty(_ELEMENTS)
    buffer = x.clone()  # DeepSpeed leaves the signs in it
    kernels = _kernels(x, error, out)
    calls = {name: kernel.run for name, kernel in kernels.items()}
    calls |= {
        _IN_PLACE[0]: lambda _: error.add_(x, alpha=1e-3),
        _COPY[0]: lambda _: out.copy_(x),
        _EAGER_ONEBIT: lambda _: eager_onebit(buffer, error),
        _LEAN_ONEBIT: lambda _: lean_onebit(x, error),
        _EAGER_QUANTIZE: lambda _: eager_quantize(x),
    }
    for call in calls.values():
        call(0)
    times = interleave(calls, rounds)
    torch.set_num_threads(threads)
    rows = []
    for name, kernel in kernels.items():
        for reference, target in kernel.eager.items():
            seconds = statistics.median(times[name]), statistics.median(times[reference])
            rows.append(Row(name, reference, target, ratio(times[name], times[reference]), seconds))
        like, size = kernel.like
        at_bandwidth = [seconds * kernel.bytes / size for seconds in times[like]]
        seconds = statistics.median(times[name]), statistics.median(at_bandwidth)
        against = f"its {kernel.bytes:.4g} bytes an element at the bandwidth of “{like}”"
        rows.append(Row(name, against, _SHARE, ratio(times[name], at_bandwidth), seconds))
    rates = [f"“{n}” {size * _ELEMENTS / statistics.median(times[n]) / 1e9:.1f} GB/s" for n, size in (_IN_PLACE, _COPY)]
    text = (
        f"{_ELEMENTS:,} fp32 elements, one thread, {rounds} rounds, {dispatch.choose('onebit', x.device)}. Bandwidths "
        f"(writes counted once): {', '.join(rates)}. A share of 70 % is a ratio of 1.43."
    )
    return Section("Kernels of compressed communication", text, rows, times=times)


def _kernels(x: torch.Tensor, error: torch.Tensor, out: torch.Tensor) -> dict[str, _Kernel]:
    tensors = Segments(torch.arange(0, _ELEMENTS + 1, 1 << 20))
    whole, blocks, int8, int4 = Segments([0, _ELEMENTS]), Segments.blocks(128, _ELEMENTS), Blockwise(8), Blockwise(4)
    onebit_eager: dict[str, float | None] = {_EAGER_ONEBIT: _FASTER, _LEAN_ONEBIT: None}
    quantize_eager: dict[str, float | None] = {_EAGER_QUANTIZE: _FASTER}
    ranks = 4
    bits = torch.stack([onebit.compress(x, error.clone(), whole)[0]] * ranks)
    scales = torch.ones(ranks, 1)
    server = torch.zeros(_ELEMENTS)
    values8, values4 = quantize.quantize(x, int8), quantize.quantize(x, int4)
    filled8, filled4 = quantize.quantize(x, int8), quantize.quantize(x, int4)
    return {
        "1-bit compress, one scale": _Kernel(
            20.125, lambda _: onebit.compress(x, error, whole), _IN_PLACE, onebit_eager
        ),
        "1-bit compress, tensors of 2^20": _Kernel(
            12.125, lambda _: onebit.compress(x, error, tensors), _IN_PLACE, onebit_eager
        ),
        "1-bit compress, blocks of 128": _Kernel(
            12.156, lambda _: onebit.compress(x, error, blocks), _IN_PLACE, onebit_eager
        ),
        "1-bit average of 4": _Kernel(4.5, lambda _: onebit.average(bits, scales, whole, out=out), _COPY),
        "1-bit average of 4, compress": _Kernel(
            13.125, lambda _: onebit.average_compress(bits, scales, server, whole), _IN_PLACE
        ),
        "int8 quantise": _Kernel(5.031, lambda _: quantize.quantize(x, int8, out=filled8), _COPY, quantize_eager),
        "int8 quantise with errors": _Kernel(
            13.031, lambda _: quantize.quantize(x, int8, error, out=filled8), _IN_PLACE
        ),
        "int4 quantise": _Kernel(4.531, lambda _: quantize.quantize(x, int4, out=filled4), _COPY, quantize_eager),
        "int8 dequantise": _Kernel(5.031, lambda _: quantize.dequantize(*values8, int8, _ELEMENTS, out=out), _COPY),
        "int4 dequantise": _Kernel(4.531, lambda _: quantize.dequantize(*values4, int4, _ELEMENTS, out=out), _COPY),
    }


def eager_onebit(buffer: torch.Tensor, error: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """The operations of DeepSpeed's compressed all-reduce, one by one; numpy packs, as torch cannot."""
    buffer.add_(error)
    scale = torch.linalg.vector_norm(buffer) / len(buffer) ** 0.5
    error.copy_(buffer - scale * buffer.sign().add_(1).bool().float().add_(-0.5).mul_(2))
    return np.packbits(buffer.sign_().add_(1).bool().numpy(), bitorder="little"), scale


def lean_onebit(x: torch.Tensor, error: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """The same in as few operations as torch allows."""
    c = x + error
    scale = torch.linalg.vector_norm(c) / len(c) ** 0.5
    positive = c >= 0
    torch.sub(c, positive.float().mul_(2).sub_(1).mul_(scale), out=error)
    return np.packbits(positive.numpy(), bitorder="little"), scale


def eager_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(-1, 128)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scales).round_().clamp_(-127, 127).to(torch.int8), scales


if __name__ == "__main__":
    print(measure(20).markdown())

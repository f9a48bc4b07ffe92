"""Kernels of compressed communication, against plain torch and against the memory bandwidth for the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import rates, tables
from benchmarks.harness.case import CPU, CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import medians, one_thread
from shardlib.kernels import onebit, quantize
from shardlib.kernels.common import dispatch
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise

_ELEMENTS = {CPU: 1 << 25, CUDA: 1 << 28}
_ODD = 1_000_003  # elements in the checks
# The operations by which the bandwidth is measured, with their bytes per element: in place, as kernels with residuals work,
# or a copy, for which the processor also reads the lines that it overwrites.
_IN_PLACE, _COPY = ("error += x", 12), ("copy", 8)
_EAGER_ONEBIT, _LEAN_ONEBIT = "1-bit, DeepSpeed's operations in torch", "1-bit, fewest operations in torch"
_EAGER_QUANTIZE = "int8, eager torch"
_FASTER, _SHARE = 0.1, 1 / 0.7
_ONEBIT: dict[str, float | None] = {_EAGER_ONEBIT: _FASTER, _LEAN_ONEBIT: None}
_QUANTIZE: dict[str, float | None] = {_EAGER_QUANTIZE: _FASTER}
_INT8, _INT4 = Blockwise(8), Blockwise(4)


class _Kernel(NamedTuple):
    """An operation by one implementation, or by the one chosen for the device; on a CPU with a reference to compare with."""

    bytes: float  # the least that must be moved, per element
    run: Callable[[str | None], Any]
    like: tuple[str, int] = _COPY
    eager: Mapping[str, float | None] = {}  # operation to compare with -> the ratio aimed for


class _Buffers:
    """The inputs of the operations."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.elements = elements
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(elements, generator=generator, device=device)
        self.error, self.server, self.out = (torch.zeros_like(self.x) for _ in range(3))

    def kernels(self) -> dict[str, _Kernel]:
        x, error, server, out, elements = self.x, self.error, self.server, self.out, self.elements
        whole, blocks = Segments([0, elements]), Segments.blocks(128, elements)
        if x.is_cuda:
            many, moved, tensors = "a scale per 16384", 20.125, Segments.blocks(1 << 14, elements)
        else:  # the second pass of the CPU's kernel reads a tensor from the cache
            each = 1 << 20
            ends = torch.arange(0, elements + each, each).clamp(max=elements)
            many, moved, tensors = "tensors of 2^20", 12.125, Segments(ends)
        bits = torch.stack([onebit.compress(x, error.clone(), whole)[0]] * 4)
        scales = torch.ones(4, 1, device=x.device)
        values8, values4 = quantize.quantize(x, _INT8), quantize.quantize(x, _INT4)
        filled8, filled4 = quantize.quantize(x, _INT8), quantize.quantize(x, _INT4)

        def compress(segments: Segments) -> Callable[[str | None], Any]:
            return lambda using: onebit.compress(x, error, segments, using=using)

        def dequantise(values: Any, form: Blockwise) -> Callable[[str | None], Any]:
            return lambda using: quantize.dequantize(*values, form, elements, out=out, using=using)

        return {
            "1-bit compress, one scale": _Kernel(20.125, compress(whole), _IN_PLACE, _ONEBIT),
            f"1-bit compress, {many}": _Kernel(moved, compress(tensors), _IN_PLACE, _ONEBIT),
            "1-bit compress, blocks of 128": _Kernel(12.156, compress(blocks), _IN_PLACE, _ONEBIT),
            "1-bit average of 4": _Kernel(4.5, lambda u: onebit.average(bits, scales, whole, out=out, using=u)),
            "1-bit average of 4, compress": _Kernel(
                13.125, lambda u: onebit.average_compress(bits, scales, server, whole, using=u), _IN_PLACE
            ),
            "int8 quantise": _Kernel(
                5.031, lambda u: quantize.quantize(x, _INT8, out=filled8, using=u), eager=_QUANTIZE
            ),
            "int8 quantise with errors": _Kernel(
                13.031, lambda u: quantize.quantize(x, _INT8, error, out=filled8, using=u), _IN_PLACE
            ),
            "int4 quantise": _Kernel(
                4.531, lambda u: quantize.quantize(x, _INT4, out=filled4, using=u), eager=_QUANTIZE
            ),
            "int8 dequantise": _Kernel(5.031, dequantise(values8, _INT8)),
            "int4 dequantise": _Kernel(4.531, dequantise(values4, _INT4)),
        }


def measure(setting: Setting) -> Result:
    buffers = _Buffers(1 << 16 if setting.small else _ELEMENTS[setting.kind], setting.device)
    return _implementations(buffers, setting) if setting.kind == CUDA else _on_one_core(buffers, setting)


def _on_one_core(buffers: _Buffers, setting: Setting) -> Result:
    kernels, x, error = buffers.kernels(), buffers.x, buffers.error
    buffer = x.clone()  # DeepSpeed leaves the signs in it
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda _, run=kernel.run: run(None) for name, kernel in kernels.items()
    }
    calls |= {
        _IN_PLACE[0]: lambda _: error.add_(x, alpha=1e-3),
        _COPY[0]: lambda _: buffers.out.copy_(x),
        _EAGER_ONEBIT: lambda _: eager_onebit(buffer, error),
        _LEAN_ONEBIT: lambda _: lean_onebit(x, error),
        _EAGER_QUANTIZE: lambda _: eager_quantize(x),
    }
    with one_thread():
        times = setting.time(calls)
    rows = []
    for name, kernel in kernels.items():
        rows += [tables.row(times, name, reference, target) for reference, target in kernel.eager.items()]
        like, size = kernel.like
        at_bandwidth = [seconds * kernel.bytes / size for seconds in times[like]]
        against = f"its {kernel.bytes:.4g} bytes an element at the bandwidth of “{like}”"
        rows.append(tables.paired(name, times[name], against, at_bandwidth, _SHARE))
    taken = medians(times)
    speeds = [f"“{n}” {size * buffers.elements / taken[n] / 1e9:.1f} GB/s" for n, size in (_IN_PLACE, _COPY)]
    about = (
        f"{buffers.elements:,} fp32 elements, one thread, {setting.rounds} rounds, {dispatch.choose('onebit', x.device)}. "
        f"Bandwidths (writes counted once): {', '.join(speeds)}. A share of 70 % is a ratio of 1.43."
    )
    return tables.compared("Kernels of compressed communication", about, rows, times)


def _implementations(buffers: _Buffers, setting: Setting) -> Result:
    calls: dict[tuple[str, str], rates.Moving] = {rates.COPY: (8, lambda: buffers.out.copy_(buffers.x))}
    for name, kernel in buffers.kernels().items():
        for using in (*rates.implementations(setting.device), "reference"):
            calls[name, using] = (kernel.bytes, lambda run=kernel.run, using=using: run(using))
    return rates.bandwidths("Kernels of compressed communication", calls, buffers.elements, setting)


def eager_onebit(buffer: torch.Tensor, error: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """The operations of DeepSpeed's compressed all-reduce, one by one; numpy packs bits, which torch cannot."""
    buffer.add_(error)
    scale = torch.linalg.vector_norm(buffer) / len(buffer) ** 0.5
    error.copy_(buffer - scale * buffer.sign().add_(1).bool().float().add_(-0.5).mul_(2))
    return np.packbits(buffer.sign_().add_(1).bool().numpy(), bitorder="little"), scale


def lean_onebit(x: torch.Tensor, error: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """1-bit compression in as few operations of torch as possible."""
    c = x + error
    scale = torch.linalg.vector_norm(c) / len(c) ** 0.5
    positive = c >= 0
    torch.sub(c, positive.float().mul_(2).sub_(1).mul_(scale), out=error)
    return np.packbits(positive.numpy(), bitorder="little"), scale


def eager_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(-1, 128)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scales).round_().clamp_(-127, 127).to(torch.int8), scales


def check(device: torch.device) -> Checks:
    """Checks that bits, values and residuals equal the reference's on the CPU, and 1-bit scales within one unit."""
    checks: dict[str, Callable[[str], bool]] = {
        "1-bit, tensors": lambda u: _check_onebit(u, device, Segments([0, 5, 5, 70_001, _ODD - 9], _ODD)),
        "1-bit, blocks": lambda u: _check_onebit(u, device, Segments.blocks(128, _ODD - 9, _ODD)),
        "int8": lambda u: _check_quantize(u, device, _INT8),
        "int4": lambda u: _check_quantize(u, device, _INT4),
    }
    return [
        (f"{name}, {using}", rates.tried(lambda each=each, using=using: rates.outcome(each(using))))
        for using in rates.implementations(device)
        for name, each in checks.items()
    ]


def _check_onebit(using: str, device: torch.device, segments: Segments) -> bool:
    x, error = torch.randn(segments.length), torch.randn(segments.length)
    c, left = x + error, error.to(device, copy=True)
    bits, scales = onebit.compress(x.to(device), left, segments, using=using)
    expected = onebit.compress(x, error, segments, using="reference")
    same = torch.equal(bits.cpu(), expected[0]) and torch.allclose(scales.cpu(), expected[1], rtol=1.2e-7, atol=0)
    # Residuals must follow from the implementation's scales, bit by bit.
    spread = segments.spread(scales.cpu())
    residual = torch.where(c >= 0, c - spread, c + spread)
    residual[segments.elements :] = 0
    both = bits.repeat(3, 1), scales * torch.rand(3, 1, device=device)
    mean = onebit.average(both[0].cpu(), both[1].cpu(), segments, using="reference")
    return (
        same
        and torch.equal(left.cpu(), residual)
        and torch.equal(onebit.average(*both, segments, using=using).cpu(), mean)
        and torch.equal(
            onebit.average_compress(*both, left, segments, using=using)[0].cpu(),
            onebit.average_compress(both[0].cpu(), both[1].cpu(), residual, segments, using="reference")[0],
        )
    )


def _check_quantize(using: str, device: torch.device, form: Blockwise) -> bool:
    same = True
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, error = torch.randn(_ODD).to(dtype), torch.randn(_ODD)
        left, wanted = error.to(device, copy=True), error
        found = quantize.quantize(x.to(device), form, left, using=using)
        expected = quantize.quantize(x, form, wanted, using="reference")
        both, plain = [t.repeat(3, 1) for t in found], [t.repeat(3, 1) for t in expected]
        pairs = [*zip(found, expected), (left, wanted)]
        total = quantize.dequantize_sum(*both, form, _ODD, dtype=dtype, using=using)
        pairs.append((total, quantize.dequantize_sum(*plain, form, _ODD, dtype=dtype, using="reference")))
        again = quantize.dequantize_sum_quantize(*both, form, _ODD, form, left, using=using)
        pairs += zip(again, quantize.dequantize_sum_quantize(*plain, form, _ODD, form, wanted, using="reference"))
        same = same and all(torch.equal(a.cpu(), b) for a, b in [*pairs, (left, wanted)])
    return same


CASE = Case(
    "communication_kernels",
    "compressing, averaging and quantising kernels against torch and the bandwidth",
    {CPU: 20, CUDA: rates.GPU_ROUNDS},
    measure,
    check,
)

"""The communication kernels on one GPU: every implementation against plain torch on the CPU, then its bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_timing import Rows, Timing
from shardlib.kernels import onebit, quantize
from shardlib.kernels.common.build import BuildError
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise

Timed = tuple[float, Callable[[], Any]]  # bytes per element, and what moves them

_ODD = 1_000_003  # elements in the checks


def implementations(device: torch.device) -> tuple[str, ...]:
    return ("cuda", "triton") if device.type == "cuda" else ("cpu",)


def checks(device: torch.device) -> Rows:
    """Bits, values and errors must be the reference's on the CPU, scales of 1-bit within one unit in the last place."""
    rows = []
    for using in implementations(device):
        for name, check in {
            "1-bit, tensors": lambda u: _check_onebit(u, device, Segments([0, 5, 5, 70_001, _ODD - 9], _ODD)),
            "1-bit, blocks": lambda u: _check_onebit(u, device, Segments.blocks(128, _ODD - 9, _ODD)),
            "int8": lambda u: _check_quantize(u, device, Blockwise(8)),
            "int4": lambda u: _check_quantize(u, device, Blockwise(4)),
        }.items():
            try:
                result = "ok" if check(using) else "WRONG"
            except (BuildError, ImportError) as reason:
                result = f"not available: {reason}"
            rows.append({"check": f"{name}, {using}", "result": result})
    return rows


def _check_onebit(using: str, device: torch.device, segments: Segments) -> bool:
    x, error = torch.randn(segments.length), torch.randn(segments.length)
    c, left = x + error, error.to(device, copy=True)
    bits, scales = onebit.compress(x.to(device), left, segments, using=using)
    expected = onebit.compress(x, error, segments, using="reference")
    same = torch.equal(bits.cpu(), expected[0]) and torch.allclose(scales.cpu(), expected[1], rtol=1.2e-7, atol=0)
    # Errors follow from the scales that came with them, bit by bit.
    spread = segments.spread(scales.cpu())
    own = torch.where(c >= 0, c - spread, c + spread)
    own[segments.elements :] = 0
    both = bits.repeat(3, 1), scales * torch.rand(3, 1, device=device)
    mean = onebit.average(both[0].cpu(), both[1].cpu(), segments, using="reference")
    return (
        same
        and torch.equal(left.cpu(), own)
        and torch.equal(onebit.average(*both, segments, using=using).cpu(), mean)
        and torch.equal(
            onebit.average_compress(*both, left, segments, using=using)[0].cpu(),
            onebit.average_compress(both[0].cpu(), both[1].cpu(), own, segments, using="reference")[0],
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


def measurements(timing: Timing) -> Rows:
    """Bytes per second of every implementation, of plain torch and of a copy, taking turns."""
    device, elements = timing.device, 1 << (16 if timing.tiny else 28)
    x, error, out = (torch.randn(elements, device=device) for _ in range(3))
    whole, tensors, blocks = Segments([0, elements]), Segments.blocks(1 << 14, elements), Segments.blocks(128, elements)
    int8, int4 = Blockwise(8), Blockwise(4)
    bits, scales = (
        torch.randint(0, 256, (4, whole.bytes), dtype=torch.uint8, device=device),
        torch.rand(4, 1, device=device),
    )
    values = quantize.quantize(x, int8)
    operations: dict[str, tuple[float, Callable[[str], Any]]] = {
        "1-bit compress, one scale": (20.125, lambda u: onebit.compress(x, error, whole, using=u)),
        "1-bit compress, a scale per 16384": (20.125, lambda u: onebit.compress(x, error, tensors, using=u)),
        "1-bit compress, blocks of 128": (12.156, lambda u: onebit.compress(x, error, blocks, using=u)),
        "1-bit average of 4": (4.5, lambda u: onebit.average(bits, scales, whole, out=out, using=u)),
        "1-bit average of 4, compress": (
            13.125,
            lambda u: onebit.average_compress(bits, scales, error, whole, using=u),
        ),
        "int8 quantise": (5.031, lambda u: quantize.quantize(x, int8, out=values, using=u)),
        "int4 quantise": (4.531, lambda u: quantize.quantize(x, int4, using=u)),
        "int8 dequantise": (5.031, lambda u: quantize.dequantize(*values, int8, elements, out=out, using=u)),
    }
    calls: dict[tuple[str, str], Timed] = {("copy", "torch"): (8, lambda: out.copy_(x))}
    for name, (size, operation) in operations.items():
        for using in (*implementations(device), "reference"):
            calls[name, using] = (size, lambda operation=operation, using=using: operation(using))
    return bandwidths("kernels of communication", calls, elements, timing)


def bandwidths(table: str, calls: dict[tuple[str, str], Timed], elements: int, timing: Timing) -> Rows:
    """Rows of (kernel, implementation), taking turns; one of them is ("copy", "torch")."""
    medians = timing.medians(table, {f"{name}, {using}": call for (name, using), (_, call) in calls.items()})
    ceiling = 8 * elements / medians["copy, torch"]
    rows = []
    for (name, using), (size, _) in calls.items():
        taken = medians.get(f"{name}, {using}")
        if taken is None:
            continue
        rate = size * elements / taken
        cells = {"kernel": name, "implementation": using, "ms": f"{taken * 1e3:.3f}"}
        rows.append(cells | {"GB/s": f"{rate / 1e9:.0f}", "of a copy's": f"{rate / ceiling:.0%}"})
    return rows

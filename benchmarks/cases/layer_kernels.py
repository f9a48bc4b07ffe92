"""The kernels of a dense transformer layer against torch: eager on one core, eager and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases.layer_operations import Function, Operation, Sizes, layer, operations
from benchmarks.harness import rates, tables
from benchmarks.harness.case import CPU, CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import Times, medians, one_thread

_SIZES = {
    CPU: Sizes(2048, 1024, 4096, 16, 512, 16, 51, (2048, 1024, 8192), 0.1),
    # No dropout, as torch draws other masks.
    CUDA: Sizes(16384, 4096, 4096, 32, 4096, 1, 0, (8192, 2048, 50304), 0.0),
}
SMALL = Sizes(64, 32, 128, 4, 32, 4, 3, (64, 32, 50), 0.0)
_CHECKED = Sizes(390, 384, 384, 3, 384, 1, 0, (32, 16, 64), 0.0)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_EAGER, _COMPILED, _COPY = "eager torch", "torch, compiled", "copy"
_FORWARD, _BACKWARD, _BOTH = "forward", "backward", "forward and backward"


def measure(setting: Setting) -> Result:
    sizes = SMALL if setting.small else _SIZES[setting.kind]
    return _on_a_gpu(sizes, setting) if setting.kind == CUDA else _on_one_core(sizes, setting)


def _on_one_core(sizes: Sizes, setting: Setting) -> Result:
    """Times of forward, and of forward and backward together, of each operation."""
    rows, times = [], {}
    with one_thread():
        for dtype in (torch.float32, torch.bfloat16):
            every = {**operations(sizes, dtype, setting.device), "a BERT layer with dropout": layer(sizes, dtype)}
            for name, operation in every.items():
                what = f"{name}, {str(dtype)[6:]}"
                times |= setting.time(
                    {
                        f"{what}, {whose}{which}": call
                        for whose, function in (("", operation.kernel), ("eager, ", operation.plain))
                        for which, call in passes(function, operation).items()
                    }
                )
                rows += [
                    tables.row(times, f"{what}, {which}", f"{what}, eager, {which}", 1.0, against=_EAGER)
                    for which in (_FORWARD, _BOTH)
                ]
    about = (
        f"{sizes.tokens:,} tokens of width {sizes.width}, MLPs of {sizes.inner}, attention of {sizes.heads} heads over "
        f"sequences of {sizes.sequence}, {sizes.loss[2]:,} words; one thread, {setting.rounds} rounds. Eager torch draws "
        "dropout from its own generator."
    )
    return tables.compared("Kernels of a dense layer", about, rows, times)


def passes(function: Function, operation: Operation) -> dict[str, Callable[[int], Any]]:
    """Calls of forward alone, without a graph, and of both passes."""
    leaves = [value.requires_grad_() for value in operation.inputs]
    with torch.no_grad():
        cotangents = [torch.randn_like(y) for y in _tuple(function(*leaves))]

    def forward(_: int) -> None:
        with torch.no_grad():
            function(*leaves)

    return {
        _BOTH: lambda _: torch.autograd.grad(_tuple(function(*leaves)), leaves, cotangents),
        _FORWARD: forward,
    }


def _on_a_gpu(sizes: Sizes, setting: Setting) -> Result:
    """Times of forward and of backward in bf16; GB/s count the least bytes that must be moved."""
    device, all_times = setting.device, Times()
    using = {"using": rates.implementations(device)[-1]}

    def timed(name: str, calls: dict[str, Callable[[int], Any]]) -> dict[str, float]:
        times = setting.time(calls, warm=rates.GPU_WARM)
        all_times.update({f"{name}, {call}": seconds for call, seconds in times.items()})
        return medians(times)

    source, into = (torch.randn(sizes.tokens, sizes.width, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = 4 * source.numel() / timed(_COPY, {"torch": lambda _: into.copy_(source)})["torch"]
    cells = []
    for name, operation in operations(sizes, torch.bfloat16, device).items():
        leaves = [x.requires_grad_() for x in operation.inputs]
        functions = {
            "ours": (lambda *given, operation=operation: operation.kernel(*given, **using))
            if operation.moved
            else operation.kernel,
            _EAGER: operation.plain,
            _COMPILED: torch.compile(operation.plain, backend="eager" if setting.small else "inductor"),
        }
        calls: dict[str, Callable[[int], Any]] = {}
        for whose, function in functions.items():
            calls |= {f"{whose}, {which}": call for which, call in _halves(function, leaves, operation).items()}
        taken = timed(name, calls)
        ways = zip((_FORWARD, _BACKWARD), operation.moved) if operation.moved else ((_BOTH, 0),)
        for way, tensors in ways:
            mine = taken[f"ours, {way}"]
            rate = tensors * 2 * leaves[0].numel() / mine
            cells.append(
                [name, way, f"{mine * 1e3:.3f}"]
                + ([f"{rate / 1e9:.0f}", f"{rate / copied:.0%}"] if tensors else ["", ""])
                + [f"{taken[f'{whose}, {way}'] / mine:.2f}" for whose in (_EAGER, _COMPILED)]
            )
    columns = ["operation", "", "ms", "GB/s", "of a copy's", f"{_EAGER} / ours", f"{_COMPILED} / ours"]
    about = f"{sizes.tokens:,} rows of {sizes.width} in bf16, {setting.rounds} rounds; GB/s count what must be moved."
    return tables.listed("Kernels of a dense layer", about, columns, cells, all_times)


def _halves(function: Function, leaves: list[torch.Tensor], operation: Operation) -> dict[str, Callable[[int], Any]]:
    if operation.moved is None:
        return {_BOTH: lambda _: torch.autograd.grad(function(*leaves), leaves)}
    outputs = _tuple(function(*leaves))
    grads = [torch.ones_like(y) for y in outputs]
    return {
        _FORWARD: lambda _: function(*leaves),
        _BACKWARD: lambda _: torch.autograd.grad(outputs, leaves, grads, retain_graph=True),
    }


def check(device: torch.device) -> Checks:
    """Checks of outputs and gradients in fp32 and bf16 against plain torch in float64 on the CPU."""
    using, checks = rates.implementations(device)[-1], []
    exact = operations(_CHECKED, torch.float64, torch.device(CPU))
    for dtype, tolerance in _TOLERANCE.items():
        for name, operation in operations(_CHECKED, dtype, device).items():
            if operation.moved is None:
                continue

            def compare(
                name: str = name, operation: Operation = operation, dtype: Any = dtype, tolerance: float = tolerance
            ) -> str:
                wanted = _results(exact[name].plain, [x.cpu().double() for x in operation.inputs], dtype)
                found = _results(operation.kernel, operation.inputs, dtype, using=using)
                error = max(
                    float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm().clamp(min=1e-9))
                    for a, b in zip(found, wanted, strict=True)
                )
                return rates.outcome(error < tolerance, f"{error:.1e}")

            checks.append((f"{name}, {using}, {str(dtype)[6:]}", rates.tried(compare)))
    return checks


def _results(function: Function, inputs: Any, dtype: torch.dtype, **options: str) -> list[torch.Tensor]:
    """Outputs, and the gradients of the inputs for fixed random gradients of the outputs, rounded to ``dtype``."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = _tuple(function(*inputs, **options))
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(y.shape, generator=generator).to(dtype).to(y.device, y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


CASE = Case(
    "layer_kernels",
    "norms, activations, softmax, rotary, losses and a whole layer against torch",
    {CPU: 20, CUDA: rates.GPU_ROUNDS},
    measure,
    check,
)

"""The pieces of a transformer's layer on one GPU: against float64 on the CPU, then against torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import Rows, Timing
from shardlib.kernels.common.build import BuildError
from shardlib.kernels.dropout import Draw, dropout
from shardlib.kernels.gelu import gelu
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy
from shardlib.kernels.norm import add_rms_norm, layer_norm, rms_norm
from shardlib.kernels.rotary import angles, rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu

Tensors = tuple[torch.Tensor, ...]
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Piece(NamedTuple):
    """One operation, beside the same in plain torch.

    Attributes:
        inputs: (rows, columns) -> what both are called with, fp32 on the CPU; floating ones have gradients.
        ours: takes ``using`` too.
        forward, backward: tensors of that size that must be moved, at least.
    """

    name: str
    inputs: Callable[[int, int], Tensors]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    forward: int
    backward: int


def _like(count: int, *vectors: bool) -> Callable[[int, int], Tensors]:
    """``count`` tensors of rows, then vectors of one number a column."""

    def make(rows: int, columns: int) -> Tensors:
        return (*torch.randn(count, rows, columns), *(torch.randn(columns) for _ in vectors))

    return make


def _turned(x: torch.Tensor, using: str) -> torch.Tensor:
    return rotary(x, *_angles(x), using=using)


def _angles(x: torch.Tensor) -> Tensors:
    cos, sin = angles(torch.arange(x.shape[-2], device=x.device), x.shape[-1])
    return cos.to(torch.promote_types(x.dtype, torch.float32)), sin.to(torch.promote_types(x.dtype, torch.float32))


def _turned_plainly(x: torch.Tensor) -> torch.Tensor:
    cos, sin = (torch.cat([part, part], -1) for part in _angles(x))
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


PIECES = [
    Piece("LayerNorm", _like(1, True, True), layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2, 3),
    Piece("RMSNorm", _like(1, True), rms_norm, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 2, 3),
    Piece(
        "RMSNorm of a sum",
        _like(2, True),
        add_rms_norm,
        lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], w, 1e-6), x + r),
        4,
        4,
    ),
    Piece("bias + GeLU", _like(1, True), lambda x, b, using: gelu(x, b, using=using), lambda x, b: F.gelu(x + b), 2, 3),
    Piece("SwiGLU", _like(2), swiglu, lambda gate, up: F.silu(gate) * up, 3, 5),
    Piece(
        "bias + dropout + residual",  # without dropping, whose mask is torch's own otherwise
        _like(2, True),
        lambda x, r, b, using: dropout(x, Draw(0.0, 1), bias=b, residual=r, using=using),
        lambda x, r, b: r + F.dropout(x + b, 0.0),
        3,
        2,
    ),
    Piece(
        "causal softmax",
        lambda rows, columns: (torch.randn(1, max(1, rows // columns), columns, columns),),
        lambda x, using: softmax(x, causal=True, scale=0.125, using=using),
        lambda x: torch.softmax(
            (x * 0.125).masked_fill(torch.ones_like(x[0, 0], dtype=torch.bool).triu(1), -torch.inf), -1
        ),
        2,
        3,
    ),
    Piece(
        "rotary",
        lambda rows, columns: (torch.randn(1, columns // 128 or 1, rows, 128),),
        _turned,
        _turned_plainly,
        2,
        2,
    ),
]


def checks(device: torch.device) -> Rows:
    """Every implementation, outputs and gradients, of fp32 and bf16, against plain torch in float64 on the CPU."""
    rows = []
    for piece in PIECES:
        for using in ("triton",) if device.type == "cuda" else ("cpu",):
            for dtype, tolerance in _TOLERANCE.items():
                inputs = [x.to(dtype) for x in piece.inputs(130, 384)]
                wanted = _results(piece.plain, [x.double() for x in inputs], dtype)
                try:
                    found = _results(piece.ours, [x.to(device) for x in inputs], dtype, using=using)
                except (BuildError, ImportError) as reason:
                    rows.append({"check": f"{piece.name}, {using}", "result": f"not available: {reason}"})
                    break
                error = max(
                    float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm().clamp(min=1e-9))
                    for a, b in zip(found, wanted, strict=True)
                )
                result = f"{'ok' if error < tolerance else 'WRONG'} ({error:.1e})"
                rows.append({"check": f"{piece.name}, {using}, {str(dtype)[6:]}", "result": result})
    return rows


def _results(
    function: Callable[..., Any], inputs: list[torch.Tensor], dtype: torch.dtype, **options: str
) -> list[torch.Tensor]:
    """Outputs, and what the inputs' gradients are when the outputs' are random numbers, the same each time, of ``dtype``."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = _tuple(function(*inputs, **options))
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(y.shape, generator=generator).to(dtype).to(y.device, y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def _tuple(found: Any) -> Tensors:
    return found if isinstance(found, tuple) else (found,)


def measurements(timing: Timing) -> Rows:
    """Forward, and backward alone, in bf16; GB/s count what must be moved at least."""
    size = (64, 256) if timing.tiny else (16384, 4096)
    elements, device = size[0] * size[1], timing.device
    source, into = (torch.randn(elements, device=device, dtype=torch.bfloat16) for _ in range(2))
    ceiling = 4 * elements / timing.medians("dense: copy", {"torch": lambda: into.copy_(source)})["torch"]
    rows = []
    for piece in PIECES:
        inputs = [x.to(device, torch.bfloat16).requires_grad_() for x in piece.inputs(*size)]
        ours = "triton" if device.type == "cuda" else "cpu"
        compiled = torch.compile(piece.plain, backend="eager" if timing.tiny else "inductor")
        functions = {
            "ours": lambda *given, piece=piece, ours=ours: piece.ours(*given, using=ours),
            "torch": piece.plain,
            "torch, compiled": compiled,
        }
        calls: dict[str, Callable[[], Any]] = {}
        for name, function in functions.items():
            calls[f"{name}: forward"] = lambda function=function, inputs=inputs: function(*inputs)
            outputs = _tuple(function(*inputs))
            grads = [torch.ones_like(y) for y in outputs]
            calls[f"{name}: backward"] = lambda outputs=outputs, inputs=inputs, grads=grads: torch.autograd.grad(
                outputs, inputs, grads, retain_graph=True
            )
        medians = timing.medians(f"dense: {piece.name}", calls)
        for way, tensors in (("forward", piece.forward), ("backward", piece.backward)):
            taken = {name: medians[f"{name}: {way}"] for name in functions}
            rate = tensors * 2 * elements / taken["ours"]
            row = {"piece": piece.name, "": way, "ms": f"{taken['ours'] * 1e3:.3f}"}
            row |= {"GB/s": f"{rate / 1e9:.0f}", "of a copy's": f"{rate / ceiling:.0%}"}
            row |= {f"{name} / ours": f"{taken[name] / taken['ours']:.2f}" for name in functions if name != "ours"}
            rows.append(row)
    return [*rows, *_cross_entropy(timing)]


def _cross_entropy(timing: Timing) -> Rows:
    """Forward and backward of an output layer: it is bound by its products, and by memory where logits are kept."""
    tokens, width, words = (32, 16, 64) if timing.tiny else (8192, 2048, 50304)
    device = timing.device
    x, weight = (torch.randn(n, width, device=device, dtype=torch.bfloat16).requires_grad_() for n in (tokens, words))
    targets = torch.randint(words, (tokens,), device=device)

    def plain() -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    losses = {
        "ours": lambda: linear_cross_entropy(x, weight, targets),
        "torch": plain,
        "torch, compiled": torch.compile(plain, backend="eager" if timing.tiny else "inductor"),
    }
    calls = {name: lambda loss=loss: torch.autograd.grad(loss(), (x, weight)) for name, loss in losses.items()}
    medians = timing.medians("dense: linear cross-entropy", calls)
    row = {"piece": "linear cross-entropy", "": "both", "ms": f"{medians['ours'] * 1e3:.3f}"}
    row |= {"GB/s": "", "of a copy's": ""}
    return [row | {f"{name} / ours": f"{medians[name] / medians['ours']:.2f}" for name in losses if name != "ours"}]

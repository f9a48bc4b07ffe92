"""The optimizers' kernels on one GPU: every implementation against plain torch, then its bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_kernels import Timed, bandwidths, implementations
from benchmarks.gpu_timing import Rows, Timing
from shardlib.kernels import adamw, adamw8, frozen_adam, global_norm, lion
from shardlib.kernels.common.build import BuildError

_ODD = 1_000_003  # elements in the checks
_RATE = torch.tensor(1e-3, dtype=torch.float64)
_ADAM = adamw.factors_at(3.0, 1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1)
_DIRECTION = adamw.direction_at(3.0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1)
_LION = lion.factors_at(1e-3, b1=0.9, b2=0.99, weight_decay=0.1)
_FROZEN = {"lr": _RATE, "eps": 1e-8, "weight_decay": 0.1}


class _Buffers:
    """What the operations work on: an fp32 state, gradients and a copy."""

    def __init__(self, elements: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.param, self.mu, self.grad, self.nu, self.moved = (
            torch.randn(elements, generator=generator, device=device) for _ in range(5)
        )
        self.nu.abs_()
        self.coded = [*adamw8.SIGNED.encode(self.mu), *adamw8.UNSIGNED.encode(self.nu)]
        self.narrow = self.grad.bfloat16()
        self.copy = torch.zeros_like(self.narrow)
        self.scale = torch.tensor(0.5, dtype=torch.float64, device=device)

    def all(self) -> tuple[torch.Tensor, ...]:
        return self.param, self.mu, self.grad, self.nu, self.moved, self.copy, *self.coded

    def operations(self) -> dict[str, tuple[float, Callable[[str], Any]]]:
        """Name -> bytes per element, and the operation by an implementation."""
        b = self
        return {
            "AdamW, bf16 in, bf16 out": (
                28,
                lambda u: adamw.adamw_(b.param, b.narrow, b.mu, b.nu, _ADAM, copy=b.copy, scale=b.scale, using=u),
            ),
            "AdamW, fp32": (28, lambda u: adamw.adamw_(b.param, b.grad, b.mu, b.nu, _ADAM, using=u)),
            "AdamW with moments in 8 bits, bf16 in, bf16 out": (
                16.0625,
                lambda u: adamw8.adamw8_(b.param, b.narrow, *b.coded, _ADAM, copy=b.copy, scale=b.scale, using=u),
            ),
            "Adam's direction": (
                28,
                lambda u: adamw.adam_direction_(b.param, b.grad, b.mu, b.nu, _DIRECTION, scale=b.scale, using=u),
            ),
            "Lion, bf16 in, bf16 out": (
                20,
                lambda u: lion.lion_(b.param, b.narrow, b.mu, _LION, copy=b.copy, scale=b.scale, using=u),
            ),
            "norm and finite check, fp32": (4, lambda u: global_norm.sum_of_squares(b.param, using=u)),
            "norm and finite check, bf16": (2, lambda u: global_norm.sum_of_squares(b.narrow, using=u)),
            "1-bit Adam's momentum": (
                12,
                lambda u: frozen_adam.own_momentum_(b.grad, b.mu, b1=0.9, scale=b.scale, using=u),
            ),
            "1-bit Adam's frozen step": (
                20,
                lambda u: frozen_adam.frozen_step_(b.param, b.mu, b.nu, using=u, **_FROZEN),
            ),
            "0/1 Adam's local step": (
                24,
                lambda u: frozen_adam.local_step_(b.grad, b.mu, b.nu, b.moved, lr=_RATE, b1=0.9, eps=1e-8, using=u),
            ),
            "1-bit LAMB's fresh step": (
                28,
                lambda u: frozen_adam.fresh_step_(
                    b.grad, b.mu, b.nu, b.moved, spread=b.scale, b1=0.9, b2=0.999, eps=1e-8, using=u
                ),
            ),
        }


def checks(device: torch.device) -> Rows:
    """All that is written must be what plain torch writes on the same device, to the last bit; sums to 1e-12."""
    rows = []
    for using in implementations(device):
        for name in _Buffers(0, device).operations():
            found, wanted = _Buffers(_ODD, device), _Buffers(_ODD, device)
            try:
                sums = found.operations()[name][1](using), wanted.operations()[name][1]("reference")
            except (BuildError, ImportError) as reason:
                rows.append({"check": f"{name}, {using}", "result": f"not available: {reason}"})
                continue
            same = all(map(torch.equal, found.all(), wanted.all()))
            if sums[0] is not None:
                same = same and torch.allclose(*sums, rtol=1e-12, atol=0)
            rows.append({"check": f"{name}, {using}", "result": "ok" if same else "WRONG"})
    return rows


def measurements(timing: Timing) -> Rows:
    """Bytes per second of every implementation, of plain torch, of torch's fused AdamW and of a copy, taking turns."""
    device, elements = timing.device, 1 << (16 if timing.tiny else 28)
    b = _Buffers(elements, device)
    count = torch.tensor(3.0, device=device)
    wide = torch.empty_like(b.grad)

    def fused(grad: torch.Tensor) -> None:
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        torch._fused_adamw_([b.param], [grad], [b.mu], [b.nu], [], [count], amsgrad=False, maximize=False, **options)

    def three_passes() -> None:
        fused(wide.copy_(b.narrow))
        b.copy.copy_(b.param)

    calls: dict[tuple[str, str], Timed] = {
        ("copy", "torch"): (8, lambda: wide.copy_(b.param)),
        ("AdamW, bf16 in, bf16 out", "torch's cast, fused, cast"): (28, three_passes),
        ("AdamW, fp32", "torch's fused"): (28, lambda: fused(b.grad)),
    }
    for name, (size, operation) in b.operations().items():
        for using in (*implementations(device), "reference"):
            calls[name, using] = (size, lambda operation=operation, using=using: operation(using))
    return bandwidths("kernels of optimizers", calls, elements, timing)

"""Kernels of optimizers' steps, against torch's functions for the same work and by their bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.harness import rates, tables
from benchmarks.harness.case import CPU, CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import one_thread
from shardlib.kernels import adamw, adamw8, frozen_adam, global_norm, lion
from shardlib.kernels.common import dispatch

_ELEMENTS = {CPU: 1 << 25, CUDA: 1 << 28}
_ODD = 1_000_003  # elements in the checks
_RATE = torch.tensor(1e-5, dtype=torch.float64)
_HYPER = {"eps": 1e-8, "weight_decay": 0.1}
_ADAM = adamw.factors_at(3.0, 1e-5, b1=0.9, b2=0.999, **_HYPER)
_DIRECTION = adamw.direction_at(3.0, b1=0.9, b2=0.999, **_HYPER)
_LION = lion.factors_at(1e-5, b1=0.9, b2=0.99, weight_decay=0.1)
_BF16, _FP32, _FROZEN = "AdamW, bf16 gradient in, bf16 parameter out", "AdamW, fp32", "1-bit Adam's frozen step"
_COPIES = "copies of as many bytes"
_NORMS = {"fp32": "norm and finite check, fp32", "bf16": "norm and finite check, bf16"}

Operation = Callable[[str | None], Any]  # by one implementation, or by what serves the device


class _Buffers:
    """The inputs of the operations: an fp32 state, gradients and a copy. ``scaled``: steps also scale the gradient."""

    def __init__(self, elements: int, device: torch.device, scaled: bool) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.param, self.mu, self.grad, self.nu, self.moved = (
            torch.randn(elements, generator=generator, device=device) for _ in range(5)
        )
        self.nu.abs_()
        self.coded = [*adamw8.SIGNED.encode(self.mu), *adamw8.UNSIGNED.encode(self.nu)]
        self.narrow = self.grad.bfloat16()
        self.copy, self.wide = torch.zeros_like(self.narrow), torch.empty_like(self.grad)
        self.spread = torch.tensor(0.5, dtype=torch.float64, device=device)
        self.scale = self.spread if scaled else None
        self.count = torch.tensor(3.0, device=device)

    def all(self) -> tuple[torch.Tensor, ...]:
        return self.param, self.mu, self.grad, self.nu, self.moved, self.copy, *self.coded

    def operations(self) -> dict[str, tuple[float, Operation]]:
        """Name -> (bytes per element, operation)."""
        b = self
        folded = {"scale": b.scale}
        into = {"copy": b.copy, **folded}
        return {
            _BF16: (28, lambda u: adamw.adamw_(b.param, b.narrow, b.mu, b.nu, _ADAM, using=u, **into)),
            _FP32: (28, lambda u: adamw.adamw_(b.param, b.grad, b.mu, b.nu, _ADAM, using=u)),
            "AdamW with moments in 8 bits, bf16 in, bf16 out": (
                16.0625,
                lambda u: adamw8.adamw8_(b.param, b.narrow, *b.coded, _ADAM, using=u, **into),
            ),
            "Adam's direction": (
                28,
                lambda u: adamw.adam_direction_(b.param, b.grad, b.mu, b.nu, _DIRECTION, using=u, **folded),
            ),
            "Lion, bf16 in, bf16 out": (20, lambda u: lion.lion_(b.param, b.narrow, b.mu, _LION, using=u, **into)),
            _NORMS["fp32"]: (4, lambda u: global_norm.sum_of_squares(b.grad, using=u)),
            _NORMS["bf16"]: (2, lambda u: global_norm.sum_of_squares(b.narrow, using=u)),
            "1-bit Adam's momentum": (
                12,
                lambda u: frozen_adam.local_momentum_(b.grad, b.mu, b1=0.9, using=u, **folded),
            ),
            _FROZEN: (20, lambda u: frozen_adam.frozen_step_(b.param, b.mu, b.nu, lr=_RATE, using=u, **_HYPER)),
            "0/1 Adam's local step": (
                24,
                lambda u: frozen_adam.local_step_(b.grad, b.mu, b.nu, b.moved, lr=_RATE, b1=0.9, eps=1e-8, using=u),
            ),
            "1-bit LAMB's fresh step": (
                28,
                lambda u: frozen_adam.fresh_step_(
                    b.grad, b.mu, b.nu, b.moved, spread=b.spread, b1=0.9, b2=0.999, eps=1e-8, using=u
                ),
            ),
        }

    def fused(self, grad: torch.Tensor) -> None:
        """AdamW by torch's fused kernel."""
        options = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "amsgrad": False, "maximize": False} | _HYPER
        torch._fused_adamw_([self.param], [grad], [self.mu], [self.nu], [], [self.count], **options)

    def three_passes(self) -> None:
        """AdamW by torch's fused kernel, with a cast before and one after."""
        self.fused(self.wide.copy_(self.narrow))
        self.copy.copy_(self.param)

    def copies(self) -> None:
        """Copies of 28 bytes for each element, as many as `_BF16` moves."""
        for tensor in (self.param, self.mu, self.nu):
            self.wide.copy_(tensor)
        self.copy.copy_(self.narrow)

    def frozen(self) -> None:
        """1-bit Adam's step with a frozen variance, in operations of torch."""
        self.mu.mul_(self.nu.sign())
        self.param.add_((self.mu / self.nu.sqrt().add_(1e-8)).add_(self.param, alpha=0.1), alpha=-1e-5)


class _Rival(NamedTuple):
    name: str
    call: Callable[[], Any]
    target: float | None


def measure(setting: Setting) -> Result:
    elements = 1 << 16 if setting.small else _ELEMENTS[setting.kind]
    buffers = _Buffers(elements, setting.device, scaled=setting.kind == CUDA)
    return _implementations(buffers, elements, setting) if setting.kind == CUDA else _on_one_core(buffers, setting)


def _on_one_core(b: _Buffers, setting: Setting) -> Result:
    rivals: Mapping[str, list[_Rival]] = {
        _BF16: [
            _Rival("torch's cast, fused step, cast", b.three_passes, 0.55),
            _Rival(_COPIES, b.copies, 1 / 0.8),
        ],
        _FP32: [_Rival("torch's fused step", lambda: b.fused(b.grad), 1.03)],
        _NORMS["fp32"]: _norms(b.grad),
        _NORMS["bf16"]: _norms(b.narrow),
        _FROZEN: [_Rival("its operations in torch", b.frozen, 0.5)],
    }
    operations = b.operations()
    finite = {name: lambda name=name: bool(operations[name][1](None).isfinite()) for name in _NORMS.values()}
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda _, name=name: finite[name]() if name in finite else operations[name][1](None) for name in rivals
    }
    calls |= {rival.name: lambda _, call=rival.call: call() for each in rivals.values() for rival in each}
    with one_thread():
        times = setting.time(calls)
    rows = [tables.row(times, name, rival.name, rival.target) for name, each in rivals.items() for rival in each]
    share = statistics.median(copies / mine for mine, copies in zip(times[_BF16], times[_COPIES], strict=True))
    about = (
        f"{len(b.param):,} elements, one thread, {setting.rounds} rounds, {dispatch.choose('adamw', b.param.device)}. "
        f"{_BF16}: {share:.0%} of the bandwidth of copies."
    )
    return tables.compared("Kernels of optimizers", about, rows, times)


def _norms(x: torch.Tensor) -> list[_Rival]:
    kind = str(x.dtype).removeprefix("torch.")

    def with_check() -> Any:
        return torch.linalg.vector_norm(x), bool(x.isfinite().all())

    return [
        _Rival(f"vector_norm, isfinite().all(), {kind}", with_check, 0.5),
        _Rival(f"vector_norm alone, {kind}", lambda: bool(torch.linalg.vector_norm(x).isfinite()), None),
    ]


def _implementations(b: _Buffers, elements: int, setting: Setting) -> Result:
    calls: dict[tuple[str, str], rates.Moving] = {
        rates.COPY: (8, lambda: b.wide.copy_(b.param)),
        (_BF16, "torch's cast, fused, cast"): (28, b.three_passes),
        (_FP32, "torch's fused"): (28, lambda: b.fused(b.grad)),
    }
    for name, (size, operation) in b.operations().items():
        for using in (*rates.implementations(setting.device), "reference"):
            calls[name, using] = (size, lambda operation=operation, using=using: operation(using))
    return rates.bandwidths("Kernels of optimizers", calls, elements, setting)


def check(device: torch.device) -> Checks:
    """All that is written must be what plain torch writes on the same device, to the last bit; sums to 1e-12."""

    def same(name: str, using: str) -> bool:
        found, wanted = (_Buffers(_ODD, device, scaled=True) for _ in range(2))
        sums = found.operations()[name][1](using), wanted.operations()[name][1]("reference")
        close = sums[0] is None or torch.allclose(*sums, rtol=1e-12, atol=0)
        return close and all(map(torch.equal, found.all(), wanted.all()))

    return [
        (f"{name}, {using}", rates.tried(lambda name=name, using=using: rates.outcome(same(name, using))))
        for using in rates.implementations(device)
        for name in _Buffers(0, device, scaled=True).operations()
    ]


CASE = Case(
    "optimizer_kernels",
    "AdamW, norms and the 1-bit family's steps against torch's",
    {CPU: 20, CUDA: rates.GPU_ROUNDS},
    measure,
    check,
)

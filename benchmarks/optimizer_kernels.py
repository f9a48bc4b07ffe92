"""The optimizers' kernels on one core: against what torch offers for the same work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.report import Row, Section
from benchmarks.timing import interleave, ratio
from shardlib.kernels import adamw, frozen_adam
from shardlib.kernels.common import dispatch
from shardlib.kernels.global_norm import sum_of_squares

_ELEMENTS = 1 << 25
_HYPER = {"eps": 1e-8, "weight_decay": 0.1}
_RATE = torch.tensor(1e-5, dtype=torch.float64)


class _Comparison(NamedTuple):
    ours: Callable[[], Any]
    theirs: Mapping[str, tuple[Callable[[], Any], float | None]]  # against what, and the ratio aimed for


def measure(rounds: int) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    comparisons = _comparisons()
    calls = {name: comparison.ours for name, comparison in comparisons.items()}
    for comparison in comparisons.values():
        calls |= {name: call for name, (call, _) in comparison.theirs.items()}
    for call in calls.values():
        call()
    times = interleave({name: lambda _, call=call: call() for name, call in calls.items()}, rounds)
    torch.set_num_threads(threads)
    rows = []
    for name, comparison in comparisons.items():
        for reference, (_, target) in comparison.theirs.items():
            seconds = statistics.median(times[name]), statistics.median(times[reference])
            rows.append(Row(name, reference, target, ratio(times[name], times[reference]), seconds))
    text = f"{_ELEMENTS:,} elements, one thread, {rounds} rounds, {dispatch.choose('adamw', torch.device('cpu'))}."
    return Section("Kernels of optimizers", text, rows, times=times)


def _comparisons() -> dict[str, _Comparison]:
    generator = torch.Generator().manual_seed(0)
    param, grad, mu = (torch.randn(_ELEMENTS, generator=generator) for _ in range(3))
    nu, narrow = torch.rand(_ELEMENTS, generator=generator) * 1e-2, grad.bfloat16()
    copy, wide, count = torch.empty_like(narrow), torch.empty_like(grad), torch.tensor(3.0)
    step = partial(adamw.adamw_, factors=adamw.factors_at(3.0, 1e-5, b1=0.9, b2=0.999, **_HYPER))

    def fused(gradient: torch.Tensor) -> None:
        options = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "amsgrad": False, "maximize": False} | _HYPER
        torch._fused_adamw_([param], [gradient], [mu], [nu], [], [count], **options)

    def three_passes() -> None:
        fused(wide.copy_(narrow))
        copy.copy_(param)

    def eager_frozen_step() -> None:
        mu.mul_(nu.sign())
        param.add_((mu / nu.sqrt().add_(1e-8)).add_(param, alpha=0.1), alpha=-1e-5)

    frozen = partial(frozen_adam.frozen_step_, param, mu, nu, lr=_RATE, **_HYPER)
    return {
        "AdamW, bf16 gradient in, bf16 parameter out": _Comparison(
            lambda: step(param, narrow, mu, nu, copy=copy),
            {"torch's cast, fused step, cast": (three_passes, 0.55)},
        ),
        "AdamW, fp32": _Comparison(
            lambda: step(param, grad, mu, nu), {"torch's fused step": (lambda: fused(grad), 1.03)}
        ),
        "norm and finite check, fp32": _norm(grad),
        "norm and finite check, bf16": _norm(narrow),
        "1-bit Adam's frozen step": _Comparison(frozen, {"its operations in torch": (eager_frozen_step, 0.5)}),
    }


def _norm(x: torch.Tensor) -> _Comparison:
    kind = str(x.dtype).removeprefix("torch.")
    return _Comparison(
        lambda: bool(sum_of_squares(x).isfinite()),
        {
            f"vector_norm, isfinite().all(), {kind}": (
                lambda: (torch.linalg.vector_norm(x), bool(x.isfinite().all())),
                0.5,
            ),
            f"vector_norm alone, {kind}": (lambda: bool(torch.linalg.vector_norm(x).isfinite()), None),
        },
    )


if __name__ == "__main__":
    print(measure(20).markdown())

"""Step times of offloaded training against the longest of computing, transferring and updating, over links of several rates.

The device is the tests' own, whose copies run behind in the time that its links need. Its computing is mostly waiting, so
that the host's processor is free for the update, as it is beside a GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.rig import on_rig

_RATES = (1e9, 4e9, 16e9)  # bytes per second in each direction
_MODES: dict[str, dict[str, Any]] = {"exact": {}, "speculate": {"speculate": True}, "delay": {"delay": True}}
_TARGET = 1.15
_HEADER = ("section", "what", "round", "seconds")
_TITLE = "Steps with offload against the longest of their parts"


class _Model(NamedTuple):
    """Layers of one square matrix.

    Attributes:
        waits: seconds that the forward of a layer waits; its backward waits for twice as long.
    """

    layers: int
    width: int
    waits: float

    @property
    def bytes(self) -> int:
        return 4 * self.layers * self.width**2

    def params(self) -> list[dict[str, torch.Tensor]]:
        return [{"w": torch.eye(self.width)} for _ in range(self.layers)]

    def loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in params:
            x = _Wait.apply(x @ layer["w"], self.waits)
        return x.square().mean()


class _Wait(torch.autograd.Function):
    """Computing that needs no processor of the host's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


def measure(setting: Setting) -> Result:
    model, rates = (_Model(2, 32, 1e-3), _RATES[:1]) if setting.small else (_Model(12, 1024, 8e-3), _RATES)
    (times,) = on_rig(_all, model, rates, setting.rounds)
    compute, update = (statistics.median(times[part]) for part in ("compute", "update"))
    cells = []
    for rate, mode in itertools.product(rates, _MODES):
        step, transfer = statistics.median(times[_name(rate, mode)]), model.bytes / rate
        longest = max(compute, update, transfer)
        parts = [f"{1e3 * part:.0f}" for part in (step, compute, transfer, update)]
        verdict = "met" if step <= _TARGET * longest else "missed"
        cells.append([f"{rate / 1e9:g} GB/s", mode, *parts, f"{step / longest:.3f}", f"≤ {_TARGET} {verdict}"])
    about = (
        f"{model.layers} layers of {model.width} × {model.width} in fp32, stage 0, {model.bytes / 1e6:.0f} MB of gradients "
        "down and of parameters up, AdamW behind a clip that is not reached; medians, in milliseconds. The device is the "
        f"tests' own; its layers wait for {1e3 * model.waits:g} ms in forward and twice as long in backward, and it computes "
        "the rest (gradients' norms, copies) on the host's processor, which a GPU would not. Compute is loss and gradients "
        "without an optimizer or offload; transfer the bytes of one direction at the link's rate; update the "
        "optimizer's alone, on the host."
    )
    columns = ["link", "mode", "step", "compute", "transfer", "update", "step / longest", "target"]
    samples = [(_TITLE, what, n, f"{t:.9f}") for what, seconds in times.items() for n, t in enumerate(seconds)]
    return Result(tables.section(_TITLE, about, tables.grid(columns, cells)), _HEADER, samples)


def _all(mesh: sl.Mesh, model: _Model, rates: tuple[float, ...], rounds: int) -> dict[str, list[float]]:
    from helpers import rig

    torch.set_num_threads(1)
    x = torch.randn(1, model.width).to(mesh.device)
    on_device = sl.shard(model.params(), mesh, sl.zero(0))
    times = {"compute": _timed(lambda: sl.value_and_grad(model.loss)(on_device, x), rounds)}
    times["update"] = _timed(_update(model), rounds)
    for rate, (mode, options) in itertools.product(rates, _MODES.items()):
        params = sl.shard(model.params(), mesh, sl.chain(sl.zero(0), sl.offload(**options)))
        state, train_step = sl.make_train_step(model.loss, params, _optimizer())
        states = [state]

        def step(states: list[Any] = states, train_step: Callable[..., Any] = train_step) -> None:
            states.append(train_step(states.pop(), x)[0])

        with rig.limits(up=rate, down=rate):
            times[_name(rate, mode)] = _timed(step, rounds)
    return times


def _name(rate: float, mode: str) -> str:
    return f"{mode}, {rate / 1e9:g} GB/s"


def _optimizer() -> sl.optim.GradientTransformation:
    return sl.optim.chain(sl.optim.clip_by_global_norm(1e6), sl.optim.adamw(1e-4))


def _update(model: _Model) -> Callable[[], object]:
    """An update of all parameters on the host."""
    params, grads = ({str(n): torch.randn(model.width**2) for n in range(model.layers)} for _ in range(2))
    optimizer = _optimizer()
    states = [optimizer.init(params)]
    return lambda: states.append(optimizer.apply(params, grads, states.pop()))


def _timed(call: Callable[[], object], rounds: int, warm: int = 2) -> list[float]:
    """Seconds of each call, until the device is done, after some that are not counted."""
    times = []
    for _ in range(warm + rounds):
        start = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return times[warm:]


CASE = Case(
    "overlap", "steps with offload against the longest of computing, transferring and updating", {CPU: 12}, measure
)

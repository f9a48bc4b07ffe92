"""What steps reach, for logs: learning rate, tokens per second, model FLOPs utilisation, memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.train_state import TrainState
from shardlib.optim.wrappers.inject import injected
from shardlib.plan.plan import Plan

# Published dense rates of one device, floating-point operations per second, from the makers' data sheets: 16-bit products of
# matrices with sums in fp32, and fp32 products that round nothing (torch's default).
PEAKS = {
    "V100-PCIE": {16: 112e12, 32: 14e12},
    "V100": {16: 125e12, 32: 15.7e12},
    "A100": {16: 312e12, 32: 19.5e12},
    "H100 PCIe": {16: 756e12, 32: 51e12},
    "H100 NVL": {16: 835e12, 32: 60e12},
    "H100": {16: 989e12, 32: 67e12},
    "H200 NVL": {16: 835e12, 32: 60e12},
    "H200": {16: 989e12, 32: 67e12},
}  # of names that fit, the first counts
_WINDOW = 10.0  # seconds over which a rate is averaged


class StepRates:
    """A function of the state after each step that returns what the steps reach, by name, for `Log.write`.

    The names are:

    - ``lr``: the learning rate of the step's update;
    - ``tokens_per_second``: of all ranks, over the last 10 seconds;
    - ``mfu``: model FLOPs utilisation, operations of forward and backward per second as a share of the peak. What is computed
      again does not count;
    - ``memory``: bytes, the most that torch has had of the device so far; on a CPU what the process holds now.

    What is not known is left out, and ``unknown`` says why.

    Args:
        tokens: of one step, over all ranks.
        lr: the learning rate or its schedule; by default the one that `sl.optim.inject_hyperparams` keeps in the state.
        plan: the step's plan, made with ``loss_fn`` and ``batch``, which counts operations of products.
        flops: operations of a step on one rank, in place of the plan's count.
        peak: floating-point operations per second of one device; by default the published rate of a known GPU. A CPU has
            none: give what `sl.report.measure_peak` measures, if that is to be the peak.

    Attributes:
        unknown: name -> why there is no such value.

    Raises:
        ValueError: tokens, operations or a peak that are not above 0.

    >>> state, train_step = sl.make_train_step(lambda p, x: (x @ p).square().mean(), torch.ones(4, 4), sl.optim.sgd(0.1))
    >>> rates = sl.report.StepRates(tokens=2, lr=0.1)
    >>> state, metrics = train_step(state, torch.ones(2, 4))
    >>> found = rates(state)
    >>> found["lr"], found["tokens_per_second"] > 0, rates.unknown["mfu"]
    (0.1, True, 'no plan that counts operations: give plan= or flops=')
    """

    def __init__(
        self,
        tokens: int,
        lr: float | Schedule | None = None,
        *,
        plan: Plan | None = None,
        flops: float | None = None,
        peak: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wrong = {"tokens": tokens, "flops": flops, "peak": peak}
        if bad := [f"{name}={value!r}" for name, value in wrong.items() if value is not None and not value > 0]:
            raise ValueError(
                f"StepRates({', '.join(bad)}): tokens, operations and the peak are above 0; leave out what is unknown"
            )
        self._tokens, self._clock = tokens, clock
        self._lr = None if lr is None else as_schedule(lr, "StepRates")
        self._flops = flops if flops is not None else None if plan is None else model_flops(plan)
        self._peak, self._dtype = peak, torch.float32 if plan is None else plan.computed_dtype
        self._seen = deque([(clock(), -1)])
        self.unknown: dict[str, str] = {}

    def __call__(self, state: TrainState) -> dict[str, float]:
        """The values after the step that led to ``state``. Waits for no device."""
        device = state.params.mesh.device
        now = self._clock()
        if self._seen[0][1] < 0:
            self._seen[0] = self._seen[0][0], state.step - 1
        self._seen.append((now, state.step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        (begun, first), (_, last) = self._seen[0], self._seen[-1]
        per_second = (last - first) / (now - begun) if now > begun else None
        found = {
            "lr": self._rate(state),
            "tokens_per_second": None if per_second is None else per_second * self._tokens,
            "mfu": self._share(device, per_second),
            "memory": held_memory(device),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _rate(self, state: TrainState) -> float | None:
        if self._lr is not None:
            return float(self._lr(max(_updates(state) - 1, 0)))
        kept = injected(state.opt.inner).get("lr (0)")
        if kept is None:
            self.unknown["lr"] = "neither given nor in the state: give lr=, or use sl.optim.inject_hyperparams"
        return None if kept is None else float(kept)

    def _share(self, device: torch.device, per_second: float | None) -> float | None:
        if self._flops is None:
            self.unknown["mfu"] = "no plan that counts operations: give plan= or flops="
            return None
        if self._peak is None:
            self._peak = published_peak(device, self._dtype)
        if self._peak is None:
            self.unknown["mfu"] = f"no published peak is known of this {device.type} device: give peak="
            return None
        return None if per_second is None else self._flops * per_second / self._peak


def model_flops(plan: Plan) -> float | None:
    """Floating-point operations of products of one step on one rank, the mean over stages; None for a plan without a trace.

    Of backward at most twice those of forward count: what is beyond is computed again.
    """
    if plan.traces is None:
        return None
    passes = sum(forward + min(backward, 2 * forward) for forward, backward in (trace.flops for trace in plan.traces))
    return passes * plan.step.microbatches / len(plan.everywhere.views) or None


def published_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The published rate of a device in `PEAKS`; None for others, and where products are not those of the data sheet."""
    if device.type != "cuda" or torch.version.hip:
        return None
    rounded = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"  # to TF32
    emulated = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0)
    name = torch.cuda.get_device_name(device)
    known = next((rates for model, rates in PEAKS.items() if all(word in name for word in model.split())), {})
    return None if rounded or emulated else known.get(8 * dtype.itemsize)


def held_memory(device: torch.device) -> float | None:
    """Bytes: the most that torch has had of a device so far; on a CPU what this process holds in memory now."""
    if device.type != "cpu":
        return float(torch.accelerator.max_memory_allocated(device))
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return _highest_resident()
    import resource

    return float(pages * resource.getpagesize())


def _highest_resident() -> float | None:
    """What the process has held at most, where the system says no more."""
    try:
        import resource
    except ImportError:  # as on Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)


def _updates(state: TrainState) -> float:
    """The number of updates made, which schedules count; of an optimizer that counts none, the steps."""
    return next((float(count) for count in _counts(state.opt.inner)), float(state.step))


def _counts(state: Any) -> Iterator[torch.Tensor]:
    count = getattr(state, "count", None)
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        yield count
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    for part in parts:
        yield from _counts(part)

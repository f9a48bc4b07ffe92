"""How long a step will take: the plan's exchanges and given compute times on a virtual clock.

One processor computes and every mesh axis is one link; each does one thing at a time. What runs beside what is what
the executor does: the next unit is gathered while one computes, a unit's gradients are reduced while backward goes
on, activations are waited for, and the update starts when every gradient is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.errors import IllegalComposition, MeshError, listing
from shardlib.layout import Bucket
from shardlib.plan import Plan, share


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in seconds.

    Attributes:
        total: from the batch to the next parameters.
        compute: what the processor computes of it.
        links: axis -> seconds its link is busy.
    """

    total: float
    compute: float
    links: Mapping[str, float]

    @property
    def exposed(self) -> float:
        """What the processor waits for links."""
        return self.total - self.compute

    def __str__(self) -> str:
        links = "".join(f", {axis} busy {seconds:.4g} s" for axis, seconds in self.links.items())
        return f"step {self.total:.4g} s: compute {self.compute:.4g} s, waiting {self.exposed:.4g} s{links}"


def predict_step(
    plan: Plan,
    forward: float | Mapping[str, float],
    bandwidth: Mapping[str, float],
    *,
    backward: float = 2.0,
    update: float = 0.0,
) -> StepTime:
    """The time of one step of a plan without pipeline stages.

    Args:
        forward: seconds of one micro-batch's forward, in all (shared out by elements) or unit by unit.
        bandwidth: axis -> bytes per second that one rank sends; an axis left out takes no time.
        backward: seconds of backward for each of forward.
        update: seconds of the optimizer.

    Raises:
        MeshError: an axis or a unit that the plan does not have.
        IllegalComposition: a plan with stages.
    """
    if plan.pipeline is not None:
        raise IllegalComposition(
            "predict_step does not know pipeline stages; put their schedule on a clock of its own: "
            "sl.schedules.simulate(plan.pipeline.schedule, sl.schedules.Costs(forward, input_gradient, weight_gradient))"
        )
    unknown = [f"axis {axis!r}" for axis in bandwidth if axis not in plan.sizes]
    unknown += [f"unit {unit!r}" for unit in forward if unit not in plan.units] if isinstance(forward, Mapping) else []
    if unknown:
        raise MeshError(
            f"the plan does not have\n{listing(unknown)}\nIt has axes {list(plan.sizes)} and units {plan.units}"
        )
    clock = _Clock(plan, _by_unit(plan, forward), dict(bandwidth))
    for number in range(plan.microbatches):
        clock.microbatch(backward, last=number == plan.microbatches - 1)
    clock.finish(update)
    return StepTime(clock.now, clock.computed, {axis: clock.busy.get(axis, 0.0) for axis in bandwidth})


def _by_unit(plan: Plan, forward: float | Mapping[str, float]) -> dict[str, float]:
    if isinstance(forward, Mapping):
        return {unit: forward.get(unit, 0.0) for unit in plan.units}
    elements = {unit: sum(b.size(0) for b in plan.buckets if b.unit == unit) for unit in plan.units}
    whole = sum(elements.values()) or 1
    return {unit: forward * count / whole for unit, count in elements.items()}


@dataclass
class _Clock:
    plan: Plan
    forward: dict[str, float]
    bandwidth: dict[str, float]
    now: float = 0.0  # of the processor
    computed: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # when a link is done with what it was given
    _arrival: dict[str, float] = field(default_factory=dict)  # unit -> when its gather is done
    _reduced: float = 0.0

    def microbatch(self, backward: float, last: bool) -> None:
        units = list(self.forward)
        sent = self.plan.activations or {}
        waits = {axis: sent.get(axis, 0) / 2 / max(len(units), 1) for axis in sent}
        self._pass(units, 1.0, waits, None)
        self._arrival.clear()
        self._pass(units[::-1], backward, waits, last)
        self._arrival.clear()

    def _pass(self, units: list[str], factor: float, waits: dict[str, float], last: bool | None) -> None:
        for place, unit in enumerate(units):
            self._gather(unit)
            self.now = max(self.now, self._arrival.get(unit, 0.0))
            if place + 1 < len(units) and self.plan.prefetch:
                self._gather(units[place + 1])
            self._compute(factor * self.forward[unit])
            for axis, count in waits.items():
                self.now = self._send(axis, count, self.now)
            if last is not None:
                self._reduce(unit, last)

    def _compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def _send(self, axis: str, count: float, ready: float) -> float:
        """When ``count`` bytes that are ready at a time have gone over a link."""
        if axis not in self.bandwidth or not count:
            return ready
        seconds = count / self.bandwidth[axis]
        self._free[axis] = max(ready, self._free.get(axis, 0.0)) + seconds
        self.busy[axis] = self.busy.get(axis, 0.0) + seconds
        return self._free[axis]

    def _gather(self, unit: str) -> None:
        if unit not in self._arrival:
            buckets = [bucket for bucket in self.plan.buckets if bucket.unit == unit]
            self._arrival[unit] = max((self._gathered(b, 0, b.param_level, self.now) for b in buckets), default=0.0)

    def _gathered(self, bucket: Bucket, start: int, stop: int, ready: float) -> float:
        for level in reversed(range(start, stop)):
            count = share(bucket.size(level) * bucket.dtype.itemsize, bucket.sizes[level])
            ready = self._send(bucket.axes[level], count, ready)
        return ready

    def _reduce(self, unit: str, last: bool) -> None:
        for bucket in self.plan.trained_in.get(unit, ()):
            ready, width = self.now, bucket.reduce_dtype.itemsize
            early = 0 if self.plan.sync == "last" and not last else bucket.grad_level
            for level in range(bucket.levels if last else early):
                ready = self._send(bucket.axes[level], share(bucket.size(level) * width, bucket.sizes[level]), ready)
            for axis in bucket.replicas if last else ():
                ready = self._send(axis, share(2 * bucket.owned * width, self.plan.sizes[axis]), ready)
            self._reduced = max(self._reduced, ready)

    def finish(self, update: float) -> None:
        """The update, once every gradient is there; then what must be whole again."""
        self.now = max(self.now, self._reduced)
        self._compute(update)
        stored = [self._gathered(b, b.param_level, b.levels, self.now) for b in self.plan.trained]
        self.now = max([self.now, *stored])

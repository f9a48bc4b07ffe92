"""What a rank holds in every memory at the memory's peak, and when that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlib.mesh.memories import MEMORIES
from shardlib.plan.memory import held_bytes, kept_on_host, live_bytes, microbatch_bytes, peak_bytes
from shardlib.plan.tables import size
from shardlib.plan.value import PlanValue
from shardlib.schedules import peak_of_stages

_STEP = "gradients, activations and gathered parameters"
_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "optimizer": "optimizer",
    "comm": "residuals",
    "buffers": "buffers",
}


@dataclass(frozen=True)
class Tier:
    """The peak of one memory on one rank.

    Attributes:
        memory: one of `shardlib.mesh.memories.MEMORIES`.
        when: the phase of the step, such as "backward of block 3".
        parts: what is held then, in words -> bytes.
    """

    memory: str
    when: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{what} {size(count)}" for what, count in self.parts.items())
        return f"{size(self.bytes)} in {self.memory} memory, {self.when}: {parts}"


def tiers_of(view: PlanValue, batch: int = 0) -> dict[str, Tier]:
    """Memory -> its peak on the ranks of one part of a plan; memories that hold nothing are left out.

    Args:
        view: a plan, or one of its `views`. If it was not traced, the device holds more than is counted.
        batch: bytes of a rank's batch, which lies on the device.
    """
    found = (_device(view, batch), _host(view), Tier("disk", "at all times", _state(view, "disk")))
    return {tier.memory: tier for tier in found if tier.bytes}


def peaks(plan: PlanValue, batch: int = 0) -> Iterator[Tier]:
    """The peak of each memory, on the rank where it is highest."""
    everywhere = [tiers_of(view, batch) for view in plan.views]
    for memory in MEMORIES:
        if tiers := [found[memory] for found in everywhere if memory in found]:
            yield max(tiers, key=lambda tier: tier.bytes)


def _state(view: PlanValue, memory: str, without: str = "") -> dict[str, int]:
    """What is held of the training state, in words -> bytes."""
    roles = [role for role in _NAMES if role != without and (role != "optimizer" or view.needs is not None)]
    held = {_NAMES[role]: held_bytes(view, role, memory) for role in roles}
    return {what: count for what, count in held.items() if count}


def _device(view: PlanValue, batch: int) -> Tier:
    """The device's peak. Gradients come into being while activations go, so both are one number."""
    parts = _state(view, "device", without="grad")
    parts |= {"batch": batch} if batch else {}
    peak = peak_bytes(view)
    if peak is None or view.traces is None:
        return Tier("device", "at all times", parts)
    in_flight, traces = peak_of_stages(view.stages.schedule), view.traces
    stage = max(view.local_stages, key=lambda stage: traces[stage].live - traces[stage].kept)
    step = peak - sum(_state(view, "device", without="grad").values())
    together = peak == held_bytes(view, "total", "device") + (live_bytes(view) or 0)
    when = f"in {traces[stage].live_in if together else traces[stage].peak_in}"
    if step > (microbatch_bytes(view) or 0):
        when = "in the update"
    elif view.stages.axes:
        held = sum(in_flight[number] for number in view.local_stages)
        when += f", with {held} micro-batch{'es' * (held > 1)} in flight"
    return Tier("device", when, parts | {_STEP: step})


def _host(view: PlanValue) -> Tier:
    """The host's peak. Its memory is pinned and reused, so it is held from the first time that it is needed."""
    parts, inputs = _state(view, "host"), kept_on_host(view)
    staged = max((needs.staged for needs in view.needs or ()), default=0)
    summands = sum(view.traces[stage].summands for stage in view.local_stages) if view.traces else 0
    parts |= {"inputs of blocks": inputs} if inputs else {}
    parts |= {"summands of gradients": summands} if summands else {}
    parts |= {"parameters on their way": staged} if staged else {}
    resting = [bucket for bucket in view.trained if MEMORIES[bucket.memory.optimizer].rests]
    if resting:
        widest = max(resting, key=lambda bucket: bucket.owned)
        when = f"in the update of bucket {widest.name}"
    else:
        when = "from the end of forward" if inputs else "at all times"
    return Tier("host", when, parts)

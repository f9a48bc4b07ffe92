"""What a choice holds and takes at least, in closed form: candidates are discarded by it before any plan of them is made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from shardlib.plan.machine import Machine
from shardlib.plan.records import Trace
from shardlib.plan.tables import size
from shardlib.schedules.partition import Spans, by_cost
from shardlib.search.model import Model
from shardlib.search.space import Choice

_LEAST = 1 / 8  # of the bits of a number in fp32, that a codec sends


class Excess(NamedTuple):
    """What does not fit a memory.

    Attributes:
        what: "states", "gradients and states" or "activations": what of it is too much, were all else for nothing.
        bytes: beyond the memory, at least.
    """

    what: str
    bytes: int
    stage: int
    memory: str

    def __str__(self) -> str:
        return f"{self.what} exceed {self.memory} memory by {size(self.bytes)} on stage {self.stage}"


class Stage(NamedTuple):
    """A stage of some blocks that are computed in one way, if nothing is split over the data axis.

    Attributes:
        trace: put together from those of its blocks.
        held: number of ways in which other axes divide what is split -> bytes of parameters, of gradients, of states.
    """

    trace: Trace
    held: tuple[tuple[int, float, float, float], ...]

    def share(self, role: int, data: int, split: bool) -> float:
        """Bytes of a rank, of parameters (1), gradients (2) or states (3)."""
        return sum(each[role] / (data * each[0] if split else 1) for each in self.held)


class Bounds:
    """Bounds of all choices for a model on a machine."""

    def __init__(self, model: Model, machine: Machine, ranks: int) -> None:
        self._model, self._machine, self._ranks = model, machine, ranks
        self._spans, self._stages, self._both = cache(self._cut), cache(self._summed), cache(self._timed)

    def soonest(self, choice: Choice, plain: Sequence[Trace]) -> float:
        """Seconds that a step takes if products alone took time, and were divided evenly.

        Args:
            plain: traces of all blocks for one row, on one device, without recompute.
        """
        products = sum(sum(trace.flops) for trace in plain)
        even = (
            self._model.rows * products / self._ranks / self._machine.apart(choice.size("pipe")).flops[choice.precision]
        )
        if not choice.schedule:
            return even
        # A stage waits for the first micro-batch to pass the stages before it, and they for the last one to come back; with
        # weight gradients apart (at least a third of the work) perhaps for its forward alone, another third at most.
        share = 1.0 if choice.schedule == "1f1b" else 0.25
        return even * (1 + share * (choice.size("pipe") - 1) / 2 / choice.microbatches)

    def seconds(self, choice: Choice) -> float:
        """Seconds that a step takes at least: its computation with what the loss waits for, or what its busiest link sends;
        and the update with the gathers after it."""
        stages, waited, computing = choice.size("pipe"), 0.0, 0.0
        for forward, backward in self._both(choice.traced, choice.sizes):
            computing = max(computing, waited + (forward + backward) * choice.microbatches)
            waited += forward + backward if choice.schedule == "1f1b" else forward if stages > 1 else 0.0
        wires = [self._wires(choice, stage) for stage in self._stages(choice.traced, stages)]
        before, after = map(max, zip(*wires, strict=True))
        return max(computing, before) + after + self._machine.apart(stages).overheads.step

    def _timed(self, way: Choice, sizes: tuple[tuple[str, int], ...]) -> list[tuple[float, float]]:
        """For each stage the seconds of a micro-batch's forward and backward, with the collectives that they wait for."""
        mesh = dict(sizes)
        machine = self._machine.apart(mesh.get("pipe", 1))
        found = []
        for trace, _ in self._stages(way, mesh.get("pipe", 1)):
            sent = 0.0
            for axis, count in trace.activations.items():
                if mesh.get(axis, 1) > 1:
                    link = machine.link(mesh, axis)
                    each = 2 * link.latency + machine.overheads.exchange
                    sent += count / link.bandwidth + trace.collectives.get(axis, 0) * each
            forward, backward = (
                products / machine.flops[way.precision]
                + streamed / machine.streaming
                + launches / machine.launches
                + sent / 2
                + machine.overheads.walk
                for products, streamed, launches in zip(trace.flops, trace.streamed, trace.launches, strict=True)
            )
            found.append((forward, backward))
        return found

    def _wires(self, choice: Choice, stage: Stage) -> tuple[float, float]:
        """Seconds of a stage's parameters and gradients on the link of the data axis, before the update and after it."""
        ways = choice.size("data")
        if ways == 1:
            return 0.0, 0.0
        rate = self._machine.link(choice.mesh, "data").bandwidth * ways / (ways - 1)
        stored, gradients = (stage.share(role, 1, False) for role in (1, 2))
        if choice.codec:
            gradients *= _LEAST
            stored *= _LEAST if choice.stage == 3 else 1.0
        before = gradients * (2 if choice.stage == 0 else choice.microbatches if choice.stage >= 2 else 1)
        if choice.stage == 3:
            return (before + stored * choice.microbatches) / rate, 0.0
        return before / rate, stored / rate if choice.stage else 0.0

    def excess(self, choice: Choice) -> Excess | None:
        """What a rank, or a host, cannot hold; None if nobody knows of any."""
        stages = enumerate(self._stages(choice.traced, choice.size("pipe")))
        found = [self._excess(choice, number, stage) for number, stage in stages]
        return max(filter(None, found), key=lambda each: each.bytes, default=None)

    def _excess(self, choice: Choice, number: int, stage: Stage) -> Excess | None:
        data, machine, place = choice.size("data"), self._machine, choice.offload
        stored = stage.share(1, data, choice.stage == 3)
        gradients = stage.share(2, data, choice.stage >= 2)
        states = stage.share(3, data, choice.stage >= 1)
        several = choice.size("pipe") > 1 or choice.microbatches > 1
        if place is not None:
            memory, limit = ("disk", machine.disk) if place == "disk" else ("host", machine.host_memory)
            there = states * min(self._ranks // choice.size("pipe"), machine.ranks_per_host)
            if limit is not None and there > limit:
                return Excess("states", math.ceil(there - limit), number, memory)
            states, stored, several = 0.0, stored if place == "host" else 0.0, False
            gradients = 0.0
        flights = min(choice.microbatches, choice.size("pipe") - number) if choice.schedule == "1f1b" else 1
        activations = flights * (stage.trace.kept if self._model.cuts else stage.trace.live)
        parts = {"parameters and states": stored + states}
        parts["gradients and states"] = stored + states + gradients
        parts["activations"] = stored + states + (gradients + activations if several else max(gradients, activations))
        for what, held in parts.items():
            if held > machine.memory:
                return Excess(what, math.ceil(held - machine.memory), number, "device")
        return None

    def _summed(self, way: Choice, stages: int) -> list[Stage]:
        """The stages of a pipeline whose blocks are computed in one way."""
        blocks, found = self._model.blocks(way), []
        traces = blocks.traces(way.rows)
        for span in self._spans(stages):
            totals: dict[int, Counter[int]] = {}
            for bucket in blocks.shared(*span):
                total = totals.setdefault(bucket.ways, Counter())
                total.update({1: bucket.stored, 2: bucket.gradient, 3: bucket.states})
            held = tuple((ways, total[1], total[2], total[3]) for ways, total in totals.items())
            found.append(Stage(blocks.stage(traces, *span), held))
        return found

    def _cut(self, stages: int) -> Spans:
        """The spans of a pipeline's stages, cut as `shardlib.pipeline` does."""
        return by_cost(self._model.elements, stages) if stages > 1 else ((0, self._model.count),)

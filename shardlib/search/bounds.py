"""What a choice holds at least, in closed form: candidates are discarded by it before any plan of them is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from shardlib.plan.machine import Machine
from shardlib.plan.records import Trace
from shardlib.plan.tables import size
from shardlib.schedules.partition import Spans, by_cost
from shardlib.search.model import Model
from shardlib.search.space import Choice
from shardlib.search.stages import StageCosts, Vector, stages_of


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


class Bounds:
    """Bounds of the memory of all choices for a model on a machine."""

    def __init__(self, model: Model, machine: Machine, ranks: int) -> None:
        self._model, self._machine, self._ranks = model, machine, ranks
        self._spans, self._stages = cache(self._cut), cache(self._put_together)

    def stages(self, choice: Choice) -> StageCosts:
        """The stages of a choice's pipeline.

        Raises:
            ShardlibError: blocks cannot be computed so.
        """
        return self._stages(choice.traced, choice.size("pipe"))

    def held(self, choice: Choice) -> int:
        """Bytes that a rank's device holds at least, on the stage that holds most."""
        return math.floor(self._device(choice, self.stages(choice))["activations"].max())

    def excess(self, choice: Choice) -> Excess | None:
        """What a rank, or a host, cannot hold; None if nobody knows of any."""
        machine, stages = self._machine, self.stages(choice)
        if choice.offload is not None:
            memory, limit = ("disk", machine.disk) if choice.offload == "disk" else ("host", machine.host_memory)
            sharing = min(self._ranks // choice.size("pipe"), machine.ranks_per_host)
            there = sharing * stages.bytes(lambda held: held.states, choice.size("data"), choice.stage >= 1)
            if limit is not None and there.max() > limit:
                return Excess("states", math.ceil(there.max() - limit), int(there.argmax()), memory)
        parts = self._device(choice, stages)
        most = parts["activations"]
        if most.max() <= machine.memory:
            return None
        stage = int(most.argmax())
        what = next(what for what, held in parts.items() if held[stage] > machine.memory)
        return Excess(what, math.ceil(parts[what][stage] - machine.memory), stage, "device")

    def _device(self, choice: Choice, stages: StageCosts) -> dict[str, Vector]:
        """What a device holds, in words -> bytes of each stage, each time with what comes before."""
        data, place, several = choice.size("data"), choice.offload, choice.microbatches > 1
        stored = stages.bytes(lambda held: held.stored, data, choice.stage == 3)
        gradients = stages.bytes(lambda held: held.gradients, data, choice.stage >= 2)
        states = stages.bytes(lambda held: held.states, data, choice.stage >= 1)
        most = stages.kept if self._model.cuts else stages.live
        one = np.maximum(np.maximum(most, stages.between), self._in_turn(choice, stages))
        kept = (choice.in_flight - 1) * most + one
        if place is None:
            together = several or choice.schedule is not None
            base = stored + states
        else:
            # Gradients of a micro-batch leave as they come, but those of several that are summed on the device.
            together = several and place == "host"
            gradients = gradients if together else 0 * gradients
            base = stored if place == "host" else 0 * stored
        return {
            "parameters and states": base,
            "gradients and states": base + gradients,
            "activations": base + (gradients + kept if together else np.maximum(gradients, kept)),
        }

    @staticmethod
    def _in_turn(choice: Choice, stages: StageCosts) -> Vector:
        """Bytes of what comes for its use alone, and of gradients on their way to other ranks, with what is kept then."""
        come = stages.gathered if choice.comes else 0 * stages.gathered
        if choice.stage < 2 or choice.size("data") == 1 or choice.codec is not None:
            return come
        # Pipelines send gradients away after all micro-batches.
        lands = choice.offload is not None and choice.schedule is None
        backward = stages.land if lands else stages.stay
        leave = backward.in_use if choice.comes else backward.reducing
        if choice.split:  # what is kept has become what the second half needs, but on the first stage
            leave = np.concatenate([leave[:1], backward.reduced[1:]])
        return np.maximum(come, leave)

    def _put_together(self, way: Choice, count: int) -> StageCosts:
        blocks = self._model.blocks(way)
        return stages_of(blocks, blocks.traces(way.rows), self._spans(count))

    def _cut(self, count: int) -> Spans:
        """The spans of a pipeline's stages, cut as `shardlib.pipeline` does."""
        return by_cost(self._model.elements, count) if count > 1 else ((0, self._model.count),)


# The seconds that a step takes at least, in closed form: what a virtual clock waits for whatever else it waits for.
# Every rank walks through the micro-batches in the order of a schedule. A walk takes no less than its computation, nor than
# the gathers that it begins. From the walks follows how long a pipeline takes (arXiv 2104.04473 section 2.2, 2401.10241),
# from what a micro-batch sends how long a link is busy, and from the states how long the update takes.


_LEAST = 1 / 8  # of the bits of a number in fp32, that a codec sends


class _Walks(NamedTuple):
    """Seconds of each stage's walks through a micro-batch: without gathers, and what a walk computes in its smallest unit.

    Attributes:
        back: of backward; of input gradients alone where weight gradients come apart.
        weights: of weight gradients that come apart.
        hand_on, hand_back: of the message to the next stage, and to the one before.
    """

    forward: Vector
    back: Vector
    weights: Vector
    last_forward: Vector
    last_back: Vector
    hand_on: Vector
    hand_back: Vector


class _Links(NamedTuple):
    """Seconds of each stage's links in a step.

    Attributes:
        gather, fetch: of a walk, from other ranks and from another memory; in turn for its smallest unit: `first`.
        reduced: of the gradients of one reduction.
        landed: of their way to another memory, at the end; `each` of the part that goes there after each micro-batch.
    """

    gather: Vector
    fetch: Vector
    first: Vector
    reduced: Vector
    landed: Vector
    each: Vector


class Times:
    """Bounds of the time of all choices for a model on a machine."""

    def __init__(self, model: Model, machine: Machine, ranks: int) -> None:
        self._model, self._machine, self._ranks = model, machine, ranks
        self._walks: dict[tuple[Choice, tuple[tuple[str, int], ...]], _Walks] = {}

    def soonest(self, choice: Choice, plain: Sequence[Trace]) -> float:
        """Seconds that a step takes if products alone took time, and were divided evenly.

        Args:
            plain: traces of all blocks for one row, on one device, without recompute.
        """
        products = sum(sum(trace.flops) for trace in plain)
        even = self._model.rows * products / self._ranks / self._alone(choice).flops[choice.precision]
        if choice.schedule is None:
            return even
        # A stage waits for the first micro-batch to pass the stages before it, and they for the last one to come back; with
        # weight gradients apart (at least a third of the work) perhaps for its forward alone, another third at most.
        share = 0.25 if choice.split else 1.0
        return even * (1 + share * (choice.size("pipe") - 1) / 2 / choice.microbatches)

    def seconds(self, choice: Choice, stages: StageCosts) -> float:
        """Seconds that a step takes at least.

        Args:
            stages: of the choice.
        """
        count = choice.microbatches
        links, walks = self._links(choice, stages), self._walked(choice, stages)
        forward = _with_gathers(walks.forward, walks.last_forward, links)
        back = _with_gathers(walks.back, walks.last_back, links, stages.again)
        begin = _before(forward + walks.hand_on)
        end = _before(back) + np.cumsum(walks.hand_back) + walks.weights[0]
        # From the beginning of a stage's forward to the end of its backward.
        round_trip = _from(forward + back + walks.hand_on) + _after(walks.hand_back)
        # A stage begins another forward after the backward of a micro-batch that is as many before it as are in flight.
        in_turn, more = np.divmod(count - 1, np.arange(len(begin), 0, -1))
        came_back = begin + more * forward + (in_turn + 1) * round_trip
        busy = begin + count * (forward + back + walks.weights)
        beside = np.maximum(0, count - 1 - np.arange(len(begin))) * walks.weights
        computed = max((came_back + end).max(), (begin + count * (forward + back) + beside + end).max(), busy.max())
        # The last reductions begin with the last walk that has weight gradients, others with the first one.
        first = begin + round_trip - back
        final = np.maximum(came_back - back, busy - walks.weights - (0 if choice.split else back))
        each = choice.stage >= 2
        reduced = (first + count * links.reduced if each else final + links.reduced).max()
        exchanged = (begin + count * ((1 + stages.again) * links.gather + (links.reduced if each else 0))).max()
        fetched = (begin + (1 + stages.again) * count * links.fetch).max()
        landed = max((final + links.landed).max(), (first + count * links.each).max())
        return float(max(max(computed, reduced, exchanged, fetched) + self._update(choice, stages), landed))

    def _alone(self, choice: Choice) -> Machine:
        """The machine as each stage's ranks have it, if the others compute at other times."""
        return self._machine.apart(choice.size("pipe"))

    def _walked(self, choice: Choice, stages: StageCosts) -> _Walks:
        known = (choice.traced, choice.sizes)
        if known not in self._walks:
            self._walks[known] = self._walks_of(choice, stages)
        return self._walks[known]

    def _walks_of(self, choice: Choice, stages: StageCosts) -> _Walks:
        machine, mesh = self._alone(choice), choice.mesh
        sent = np.zeros(stages.count)
        for axis, count in stages.activations.items():
            if mesh.get(axis, 1) > 1:
                link = machine.link(mesh, axis).summing
                each = link.latency + machine.overheads.exchange
                sent += count / link.bandwidth + stages.collectives.get(axis, 0.0) * each
        forward, backward = (
            products / machine.flops[choice.precision] + streamed / machine.streaming + launches / machine.launches
            for products, streamed, launches in zip(stages.flops, stages.streamed, stages.launches, strict=True)
        )
        walk, back = machine.overheads.walk, backward / 2 if choice.split else backward
        on, before = np.zeros(stages.count), np.zeros(stages.count)
        if stages.count > 1:
            link = machine.link(mesh, "pipe")
            hop = link.latency / (stages.count - 1) + machine.overheads.exchange
            on[:-1] = stages.forward[:-1] / link.bandwidth + hop * (stages.forward[:-1] > 0)
            before[1:] = stages.backward[:-1] / link.bandwidth + hop * (stages.backward[:-1] > 0)
        return _Walks(
            forward + sent / 2 + walk,
            back + sent / 2 + walk,
            back + walk if choice.split else np.zeros(stages.count),
            forward * stages.share,
            back * stages.share,
            on,
            before,
        )

    def _links(self, choice: Choice, stages: StageCosts) -> _Links:
        machine, data = self._machine, choice.size("data")
        none = np.zeros(stages.count)
        gather = fetch = unit = piece = landed = each = none
        gradients = stages.bytes(lambda held: held.gradients)
        reduced = self._sent(choice, gradients * (_LEAST if choice.codec else 1), stages.trained, choice.stage == 0)
        split = choice.stage == 3
        if split:
            share = _LEAST if choice.codec else 1
            gather = self._sent(choice, share * stages.bytes(lambda held: held.stored), stages.buckets)
            unit = self._sent(choice, share * stages.unit, np.ones(stages.count))
        if choice.offload is not None:
            down, owned = machine.ways.get("down", math.inf), choice.stage >= 1
            landed = stages.bytes(lambda held: held.gradients, data, owned) / down
            if choice.offload != "host":
                if choice.stage >= 2 or data * choice.size("expert") == 1:
                    each = stages.bytes(lambda held: held.alone, data, owned) / down
                up = machine.ways.get("up", math.inf)
                fetch = stages.bytes(lambda held: held.stored, data, split) / up
                piece = stages.piece / (data if split else 1) / up
        return _Links(gather, fetch, unit + piece, reduced, landed, each)

    def _sent(self, choice: Choice, count: Vector, messages: Vector, sums: bool = False) -> Vector:
        """Seconds of bytes that are gathered, or reduced and split, or all-reduced, over the data axis."""
        ways = choice.size("data")
        if ways == 1:
            return np.zeros(len(count))
        link = self._machine.link(choice.mesh, "data")
        if sums:  # codecs send a sum as other messages
            link = (replace(link, sums=None) if choice.codec else link).summing
            count = 2 * count
        return count * (ways - 1) / ways / link.bandwidth + messages * link.latency

    def _update(self, choice: Choice, stages: StageCosts) -> float:
        """Seconds of the update, and of the gathers after it."""
        machine, data, split = self._alone(choice), choice.size("data"), choice.stage >= 1
        ways = machine.ways
        states = stages.bytes(lambda held: held.states, data, split)
        trained = stages.bytes(lambda held: held.trained, data, split)
        seconds = machine.overheads.step + machine.overheads.bucket * stages.trained
        seconds += sum(
            machine.link(choice.mesh, axis).summing.latency for axis in ("data", "pipe") if choice.size(axis) > 1
        )
        restored = np.zeros(stages.count)
        if choice.stage in (1, 2):
            restored = self._sent(choice, stages.bytes(lambda held: held.trained), stages.trained)
        if choice.offload is None:
            gradients = stages.bytes(lambda held: held.gradients, data, split)
            seconds += (2 * states + 2 * trained + gradients) / machine.in_place + restored
        else:
            up = trained / ways.get("up", math.inf) if choice.offload == "host" else 0 * trained
            seconds = np.maximum.reduce([seconds, states / ways.get("update", math.inf), up, restored])
        return float(seconds.max())


def _with_gathers(computed: Vector, last: Vector, links: _Links, share: Vector | float = 1.0) -> Vector:
    """Seconds of a walk that gathers a ``share`` of all: the first unit waits until it is there, and the last one is computed
    once all are. (What is not gathered is computed last.)"""
    return np.maximum(computed + links.first, share * np.maximum(links.gather, links.fetch) + last)


def _before(seconds: Vector) -> Vector:
    """Of all stages before each one."""
    return np.cumsum(seconds) - seconds


def _from(seconds: Vector) -> Vector:
    """Of each stage with all that come after it."""
    return np.cumsum(seconds[::-1])[::-1]


def _after(seconds: Vector) -> Vector:
    """Of all stages after each one."""
    return _from(seconds) - seconds

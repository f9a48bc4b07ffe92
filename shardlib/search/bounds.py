"""What a choice holds at least, in closed form: candidates are discarded by it before any plan of them is made."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from shardlib.plan.machine import Machine
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

"""What a search chooses from: meshes, and for each of them chains of transforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlib.optim.checks import is_step
from shardlib.plan.transform import Chain, Transform, chain
from shardlib.transforms import (
    accumulate,
    experts,
    offload,
    pipeline,
    precision,
    quantize,
    remat,
    sequence,
    tensor_slicing,
    zero,
)

FOLDER = "states"
_OFFLOADS = {
    "host": offload(),
    "host, parameters too": offload(params="host", gradients="host"),
    "disk": offload("disk", params="disk", gradients="disk", folder=FOLDER),
}
# Schedule of a pipeline -> whether it has weight gradients apart. Of one stage for each rank, which forwards enter in turn.
_SCHEDULES = {"1f1b": False, "zb-h1": True}
AXES = ("pipe", "data", "expert", "seq", "model")  # neighbours along the last one
_AXES = {"ulysses": "seq", "ring": "seq", "megatron": "model"}  # kind of sequence parallelism -> its axis


@dataclass(frozen=True)
class Space:
    """The values that a search tries, beside all meshes and all sizes of micro-batches.

    Attributes:
        stages: of ZeRO.
        precisions: of `shardlib.precision`, of which those are tried that the machine has a rate for.
        recompute: policies of `shardlib.remat`; None for no recompute.
        schedules: of a pipeline: "1f1b" and "zb-h1".
        codecs: of gradients, and at stage 3 of parameters, over axis "data"; None for none. They change what is learnt, so
            none is tried unless it is named.
        offloads: "host", "host, parameters too" and "disk"; None for none. Tried where the machine has such memory.
        sequences: kinds of `shardlib.sequence`, for a loss that is made for it; None for none.
        largest: the size that an axis has at most, where its name is given.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    recompute: tuple[str | None, ...] = (None, "full")
    schedules: tuple[str, ...] = ("1f1b", "zb-h1")
    codecs: tuple[str | None, ...] = (None,)
    offloads: tuple[str | None, ...] = (None, "host", "host, parameters too")
    sequences: tuple[str | None, ...] = (None,)
    largest: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        known: dict[str, set[str | None]] = {
            "offloads": {None, *_OFFLOADS},
            "sequences": {None, *_AXES},
            "schedules": {*_SCHEDULES},
        }
        for name, values in known.items():
            if unknown := [value for value in getattr(self, name) if value not in values]:
                raise ValueError(f"Space({name}=) has {unknown[0]!r}: use {', '.join(map(repr, values))}")
        several = ("stages", "precisions", "recompute", "schedules", "codecs", "offloads", "sequences")
        if empty := [name for name in several if not getattr(self, name)]:
            raise ValueError(
                f"Space({', '.join(f'{name}=()' for name in empty)}): give one value at least, or leave it out"
            )
        largest = dict(self.largest or {})
        if wrong := {axis: most for axis, most in largest.items() if axis not in AXES or not is_step(most)}:
            raise ValueError(
                f"Space(largest={wrong}): use the names of axes, {', '.join(AXES)}, and sizes of at least 1 for them"
            )


@dataclass(frozen=True)
class Choice:
    """A mesh and a chain of transforms.

    Attributes:
        sizes: axis -> size, in the order of the mesh.
        microbatches: into which each rank's rows are cut.
        rows: of a micro-batch.
        stage, precision, recompute, schedule, codec, offload, sequence: see `Space`.
    """

    sizes: tuple[tuple[str, int], ...]
    microbatches: int
    rows: int
    stage: int = 0
    precision: str = "fp32"
    recompute: str | None = None
    schedule: str | None = None
    codec: str | None = None
    offload: str | None = None
    sequence: str | None = None

    def size(self, axis: str) -> int:
        """The size of an axis, 1 where there is none."""
        return dict(self.sizes).get(axis, 1)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size."""
        return dict(self.sizes)

    @property
    def split(self) -> bool:
        """Whether backward computes weight gradients apart."""
        return self.schedule is not None and _SCHEDULES[self.schedule]

    @property
    def comes(self) -> bool:
        """Whether parameters come to the device for their use alone: from other ranks, or from another memory."""
        return (self.stage == 3 and self.size("data") > 1) or self.offload not in (None, "host")

    @property
    def in_flight(self) -> NDArray[np.int64]:
        """For each stage of the pipeline the micro-batches whose activations it holds at once, at most."""
        stages = self.size("pipe")
        waiting = np.full(stages, stages) if self.split else np.arange(stages, 0, -1)
        return np.minimum(waiting, self.microbatches)

    def transform(self, rules: Mapping[str, Any] | None) -> Chain:
        """The chain.

        Args:
            rules: of `shardlib.tensor_slicing`.
        """
        split = tuple(axis for axis in ("data", "expert") if axis in self.mesh)
        members: list[Transform] = [zero(self.stage, split[0] if len(split) == 1 else split)]
        if "expert" in self.mesh:
            members.append(experts())
        if "model" in self.mesh:
            members.append(tensor_slicing(rules or {}))
        if self.sequence:
            members.append(sequence(_AXES[self.sequence], self.sequence))
        if self.schedule:
            members.append(pipeline(self.schedule, self.microbatches))
        elif self.microbatches > 1:
            members.append(accumulate(self.microbatches))
        if self.precision != "fp32":
            members.append(precision(self.precision))
        if self.recompute:
            members.append(remat(self.recompute))
        if self.codec:
            members.append(quantize(self.codec if self.stage == 3 else None, self.codec))
        if self.offload:
            members.append(_OFFLOADS[self.offload])
        return chain(*members)

    @property
    def traced(self) -> Choice:
        """The choice with what a block's operations depend on alone: slices, precision, recompute, rows and halves."""
        kept = tuple((axis, size) for axis, size in self.sizes if axis in ("model", "seq", "expert"))
        schedule = self.schedule if self.split else None
        return Choice(kept, 1, self.rows, 0, self.precision, self.recompute, schedule, sequence=self.sequence)

    def __str__(self) -> str:
        parts = [" × ".join(f"{axis}={size}" for axis, size in self.sizes), f"stage {self.stage}", self.precision]
        parts += [f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)} of {self.rows} rows"]
        parts += [f"recompute {self.recompute}"] if self.recompute else []
        parts += [text for text in (self.schedule, self.sequence, self.codec) if text]
        parts += [f"states on {self.offload}"] if self.offload else []
        return ", ".join(parts)


def choices(space: Space, meshes: Iterable[Mapping[str, int]], rows: int, memories: frozenset[str]) -> Iterator[Choice]:
    """All choices of a space on some meshes.

    Args:
        rows: of the batch of all ranks.
        memories: beside the device's, that the machine has.
    """
    for mesh in meshes:
        shared = mesh.get("data", 1) * mesh.get("expert", 1)
        if rows % shared:
            continue
        share = rows // shared
        kinds = [kind for kind in space.sequences if _fits(kind, mesh)]
        codecs = [codec for codec in space.codecs if codec is None or mesh.get("data", 1) > 1]
        offloads = [place for place in space.offloads if place is None or place.split(",")[0] in memories]
        stages = [stage for stage in space.stages if shared > 1 or stage == min(space.stages)]
        whole = Choice(tuple(mesh.items()), 1, share)
        for each, precision_, policy, kind in itertools.product(
            _sizes(share), space.precisions, space.recompute, kinds
        ):
            for stage, codec, place in itertools.product(stages, codecs, offloads):
                found = replace(
                    whole, microbatches=share // each, rows=each, stage=stage, precision=precision_, recompute=policy
                )
                found = replace(found, codec=codec, offload=place, sequence=kind)
                for schedule in space.schedules if "pipe" in mesh else (None,):
                    yield replace(found, schedule=schedule)


def _fits(kind: str | None, mesh: Mapping[str, int]) -> bool:
    """Whether a kind of sequence parallelism is for a mesh: an axis "seq" is there for it alone."""
    if kind is None:
        return "seq" not in mesh
    return _AXES[kind] in mesh and ("seq" in mesh) == (_AXES[kind] == "seq")


def meshes(space: Space, ranks: int, blocks: int, slices: bool, experts: int) -> Iterator[dict[str, int]]:
    """Axis -> size, neighbours along the last axis: what sends most, and waits for it, stays on a host.

    Args:
        blocks: of the loss; 1 for a loss that no pipeline cuts.
        slices: whether there are rules to slice layers by.
        experts: of a layer, at most; 0 for a model without.
    """
    sequences = any(_AXES[kind] == "seq" for kind in space.sequences if kind)
    most = {
        "pipe": blocks,
        "expert": max(1, experts),
        "seq": ranks if sequences else 1,
        "model": ranks if slices else 1,
    }
    for axis, size in (space.largest or {}).items():
        most[axis] = min(size, most.get(axis, ranks))
    for sizes in itertools.product(*(_divisors(ranks, most[axis]) for axis in AXES if axis != "data")):
        used = math.prod(sizes)
        if ranks % used or ranks // used > most.get("data", ranks):
            continue
        mesh = {"pipe": sizes[0], "data": ranks // used, "expert": sizes[1], "seq": sizes[2], "model": sizes[3]}
        yield {axis: size for axis, size in mesh.items() if size > 1 or axis == "data"}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _sizes(rows: int) -> list[int]:
    """Numbers of rows of a micro-batch: those that divide a rank's, at least twice as many each time."""
    found = [1]
    for n in range(2, rows + 1):
        if rows % n == 0 and n >= 2 * found[-1]:
            found.append(n)
    return found

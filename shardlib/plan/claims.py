"""What a transform can say, and nothing else: four kinds of claim, each on slots that one transform may hold.

`Use`: how a leaf is used in the loss. `Reduce`: how an axis is reduced. `Live`: where a leaf of the state lives.
`Step`: how the step is scheduled. Claims carry no order, so `chain` commutes: two transforms that claim one
slot are refused, and everything else is a union (see `shardlib.plan.resolve`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.codecs.integers import Packing
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.mesh.specs import P
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.stages import Stages
from shardlib.tree import matches

SECOND = "second"  # the role of a further copy of the parameters, kept from forward to backward


@dataclass(frozen=True)
class LeafInfo:
    """What a transform sees of a parameter: its path, global shape and dtype; ``aliases`` are a tied leaf's other paths."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    def matches(self, globs: str | Sequence[str]) -> bool:
        """Whether any of its paths matches one of the globs."""
        return any(matches(path, globs) for path in (self.path, *self.aliases))


@dataclass(frozen=True)
class AxisUse:
    """What an axis of the mesh is used for.

    Attributes:
        name: two uses of one name go together; of different names they exclude each other, but for ``beside``.
        does: what a transform does with the axis, for messages.
        beside: the name of another use that may be made of the same axis.
        joins: whether an axis with that other use is what it wants, and not one of its own.
    """

    name: str
    does: str
    beside: str = ""
    joins: bool = False


BATCH = AxisUse("batch", "shares the batch out")
OF_BATCH = AxisUse("batch", "shares the batch out", "batch", joins=True)
SLICES = AxisUse("slices", "slices layers")
EXPERTS = AxisUse("experts", "shares experts out", "batch", joins=True)
STAGES = AxisUse("stages", "lays out stages")


class Claim(ABC):
    """Something said about one subject; see the four kinds."""

    subject_field: ClassVar[str]

    @property
    def subject(self) -> str:
        """What it is said of: a leaf's path, an axis, a role, or the step."""
        return getattr(self, self.subject_field) if self.subject_field else ""

    def slots(self) -> dict[str, Any]:
        """What is said, by slot; two transforms may not fill the same slot of one subject."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != self.subject_field)  # type: ignore[arg-type]
        return {name: value for name, value in given if value is not None}

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        """The axes that it makes use of."""
        return ()

    @staticmethod
    @abstractmethod
    def named(subject: str, slot: str) -> str:
        """A slot in a message."""


@dataclass(frozen=True)
class Use(Claim):
    """How one leaf is used in the loss: its compute spec, how slices work together, its dtype, whether it is trained.

    Attributes:
        master: dtype of the optimizer's own copy.
        stages: those that use it.
        varying: axes of ``spec`` over which the batch varies as well (experts): what a rank holds there is reached by every
            rank's batch, so its gradient is complete and not summed over them.
    """

    subject_field = "path"

    path: str
    spec: P | None = None
    dtype: torch.dtype | None = None
    trainable: bool | None = None
    style: Style | None = None
    master: torch.dtype | None = None
    stages: tuple[int, ...] | None = None
    varying: tuple[str, ...] | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        varying = self.varying or ()
        return [(axis, EXPERTS if axis in varying else SLICES) for axis in (self.spec.axes if self.spec else ())]

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the {slot} of {subject}"


@dataclass(frozen=True)
class Reduce(Claim):
    """How gradients are summed: over which axis the batch varies, by which method, in which dtype.

    ``axis="*"`` speaks of every axis.

    Attributes:
        codec: how gradients travel over the axis, where not as they are.
        gathered: how the parameters travel that are split over it.
        owner: the optimizer that sums over the axis itself, once it has got that far.
    """

    subject_field = "axis"

    axis: str
    method: str | None = None
    dtype: torch.dtype | None = None
    codec: Codec | None = None
    gathered: Packing | None = None
    owner: AxisOwner | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        return [] if self.axis == "*" else [(self.axis, BATCH if self.method else OF_BATCH)]

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the reduction over axis {subject!r} ({slot})"


@dataclass(frozen=True)
class AxisOwner:
    """The optimizer that sums gradients over ``axis`` itself, in few bits, once it has got that far; ``name`` is its own."""

    name: str
    axis: str
    codec: Codec


@dataclass(frozen=True)
class Live(Claim):
    """Where tensors of one role of the state live: split over an axis, or in another memory.

    Attributes:
        role: "param", "grad" or "optimizer"; `SECOND` for a further copy of the parameters.
        axis: over which they are split.
        memory: one of `shardlib.mesh.specs.MEMORIES`.
    """

    subject_field = "role"

    role: str
    axis: str | None = None
    memory: str | None = None

    def slots(self) -> dict[str, Any]:
        split = {} if self.axis is None else {f"axis {self.axis!r}": self.axis}
        return split if self.memory is None else {**split, "memory": self.memory}

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        return [] if self.axis is None else [(self.axis, OF_BATCH)]

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return (
            f"the memory of the {subject} state"
            if slot == "memory"
            else f"the split of the {subject} state over {slot}"
        )


@dataclass(frozen=True)
class Step(Claim):
    """How the step is scheduled.

    Attributes:
        microbatches: parts a rank's batch is cut into; gradients are summed over them.
        sync: "each" reduces gradients after every micro-batch, "last" only after the last.
        remat: activation recompute policy of blocks.
        prefetch: whether the next unit is gathered while one computes.
        loss_scale: what losses are multiplied by at first, and how that changes.
        cast_batch: dtype that floating batch leaves are cast to.
        stages: several, along an axis.
        sequence: over which axis sequences are cut, and how.
    """

    subject_field = ""

    microbatches: int | None = None
    sync: str | None = None
    remat: Any = None
    prefetch: bool | None = None
    loss_scale: LossScale | None = None
    cast_batch: torch.dtype | None = None
    stages: Stages | None = None
    sequence: SequenceKind | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        for axis in self.stages.axes if self.stages else ():
            yield axis, STAGES
        if self.sequence:
            beside = "slices" if self.sequence.gathers_for_slices else "batch"
            yield self.sequence.axis, AxisUse("sequence", "cuts sequences", beside, joins=beside == "slices")

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the schedule's {slot}"

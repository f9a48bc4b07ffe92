"""Claims: the four things a transform can say about a plan.

`Use`: how a leaf is used in the loss. `Reduce`: how an axis is reduced. `Live`: where a leaf of the state lives.
`Step`: how the step is scheduled. The fields of a claim are its slots. Claims carry no order, so `chain` commutes: two
transforms that claim one slot are refused, unless their values have a union, and everything else is a union (see
`shardlib.plan.transform`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from shardlib.collectives.codecs.base import Codec, Packing
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.collectives.summation import Summation
from shardlib.collectives.tokens import TokenExchange
from shardlib.mesh.specs import P
from shardlib.plan.drops import LayerDrop, TokenDrop
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.recompute import Recompute
from shardlib.plan.stages import Stages
from shardlib.tree import matches


class ModuleTiles(NamedTuple):
    """A module that runs on one tile of its tokens after the other (see `shardlib.nn.tiled`).

    Attributes:
        module: the path of the module's parameters.
        tiles: number of tiles.
    """

    module: str
    tiles: int

    def __str__(self) -> str:
        return f"{self.module} in {self.tiles} tiles"


# When states in host memory are updated: "exact", once the step has the norm of all gradients; "speculate", as each gradient
# arrives, into other memory, which is dropped where the norm demands another factor; "delay", while the next step computes.
UPDATES = ("exact", "speculate", "delay")

ROLES = ("param", "grad", "optimizer")  # of the training state
SECOND = "second"  # the role of a further copy of the parameters, kept from forward to backward


@dataclass(frozen=True)
class LeafInfo:
    """What a transform sees of a parameter.

    Attributes:
        path: the parameter's path; the first one of a tied leaf.
        shape: the global shape.
        aliases: the other paths of a tied leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    def matches(self, globs: str | Sequence[str]) -> bool:
        """Whether any path of the leaf matches one of the globs."""
        return any(matches(path, globs) for path in (self.path, *self.aliases))


@dataclass(frozen=True)
class AxisUse:
    """A use of an axis of the mesh. Uses of one name go together on an axis; other uses exclude each other.

    Attributes:
        name: the kind of use.
        does: what a transform does with the axis, in the words of a message.
        beside: the name of another kind of use that the same axis may have.
        joins: whether the use belongs on an axis that has the use ``beside``, instead of on an axis of its own.
        varies: whether the batch varies over the axis.
    """

    name: str
    does: str
    beside: str = ""
    joins: bool = False
    varies: bool = False


BATCH = AxisUse("batch", "divides the batch", varies=True)
OF_BATCH = AxisUse("batch", "divides the batch", "batch", joins=True)
SLICES = AxisUse("slices", "slices layers")
EXPERTS = AxisUse("experts", "divides experts", "batch", varies=True)
STAGES = AxisUse("stages", "lays out stages")


class Claim(ABC):
    """A statement about one subject: a leaf, an axis, a role of the state, or the step.

    Attributes:
        subject_field: the name of the field that holds the subject; "" for claims about the step.
    """

    subject_field: ClassVar[str]

    @property
    def subject(self) -> str:
        """A leaf's path, an axis, or a role; "" for the step."""
        return getattr(self, self.subject_field) if self.subject_field else ""

    def slots(self) -> dict[str, Any]:
        """Slot -> claimed value. Two transforms may not fill the same slot of one subject."""
        given = ((name, getattr(self, name)) for name in _slots(type(self)))
        return {name: value for name, value in given if value is not None}

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        """The axes that the claim uses, each with its use."""
        return ()

    @staticmethod
    def union(slot: str, one: Any, other: Any) -> Any | None:
        """The value of a slot that two transforms fill together; None where they may not."""
        return None

    @staticmethod
    @abstractmethod
    def named(subject: str, slot: str) -> str:
        """A slot of a subject, as messages name it."""


@cache  # a plan has claims about every leaf
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name != kind.subject_field)


@dataclass(frozen=True)
class Use(Claim):
    """How one leaf is used in the loss.

    Attributes:
        spec: the compute spec: the slices that ranks compute with. Transforms that cut other dimensions over other axes fill
            it together.
        dtype: of the stored parameter, and in the loss.
        trainable: whether the leaf is trained.
        style: how the ranks that hold slices compute a layer together.
        master: dtype of the optimizer's own copy.
        stages: the stages that use the leaf.
        varying: axes of ``spec`` over which the batch varies too (experts). All ranks' batches reach every slice there, so a
            slice's gradient is complete and is not summed over these axes.
        tiles: number of tiles of the leaf's first dimension that are gathered and used one after the other.
        tokens: a module, to which the leaf belongs, that runs in tiles of its tokens.
        scaled: whether matrix products by the leaf are in 8 bits, its factors scaled.
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
    tiles: int | None = None
    tokens: ModuleTiles | None = None
    scaled: bool | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        varying = self.varying or ()
        return [(axis, EXPERTS if axis in varying else SLICES) for axis in (self.spec.axes if self.spec else ())]

    @staticmethod
    def union(slot: str, one: Any, other: Any) -> Any | None:
        return one.beside(other) if slot == "spec" else None

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the {slot} of {subject}"


@dataclass(frozen=True)
class Reduce(Claim):
    """How gradients, losses and norms are reduced over one axis, or over every axis (``axis="*"``).

    Attributes:
        method: "sum" where the batch varies over the axis.
        dtype: in which 16-bit gradients are summed.
        codec: the form in which gradients are sent and summed on the axis, such as compressed; None for the transport's sum.
        gathered: compresses parameters that are gathered over the axis; None to send them uncompressed.
        owner: the optimizer that, from a step of its choice, sums over the axis itself.
        summation: how losses, weights and norms are summed, over elements, micro-batches and every axis; of "*" only.
    """

    subject_field = "axis"

    axis: str
    method: str | None = None
    dtype: torch.dtype | None = None
    codec: Codec | None = None
    gathered: Packing | None = None
    owner: AxisOwner | None = None
    summation: Summation | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        return [] if self.axis == "*" else [(self.axis, BATCH if self.method else OF_BATCH)]

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the reduction over axis {subject!r} ({slot})"


@dataclass(frozen=True)
class AxisOwner:
    """An optimizer that, from a step of its choice, sums gradients over an axis itself, compressed.

    Attributes:
        name: the optimizer's name, for messages.
        codec: compresses the means that the optimizer sends.
    """

    name: str
    axis: str
    codec: Codec


@dataclass(frozen=True)
class Live(Claim):
    """Where the tensors of one role of the state live: split over an axis, or in another memory, all or a share of them.

    Attributes:
        role: "param", "grad" or "optimizer"; `SECOND` for the copy of the parameters kept from forward to backward.
        axis: an axis that the tensors are split over.
        memory: one of `shardlib.mesh.memories.MEMORIES`.
        share: the share of the role's bytes that live in ``memory``, by default all; the others on the device.
        folders: where the files of a memory on disk are.
    """

    subject_field = "role"
    PLACES: ClassVar = ("memory", "share", "folders")  # slots that are no split over an axis

    role: str
    axis: str | None = None
    memory: str | None = None
    share: float | None = None
    folders: tuple[str, ...] | None = None

    def slots(self) -> dict[str, Any]:
        claimed = {f"axis {self.axis!r}": self.axis} | {slot: getattr(self, slot) for slot in Live.PLACES}
        return {slot: value for slot, value in claimed.items() if value is not None}

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        return [] if self.axis is None else [(self.axis, OF_BATCH)]

    @staticmethod
    def named(subject: str, slot: str) -> str:
        kind = slot if slot in Live.PLACES else "split"
        return f"the {kind} of the {subject} state" + (f" over {slot}" if kind == "split" else "")


@dataclass(frozen=True)
class Step(Claim):
    """How the step is scheduled.

    Attributes:
        microbatches: number of micro-batches per rank and step; gradients are summed over them.
        total_microbatches: number of micro-batches of all ranks together, which are summed in one binary tree.
        sync: "each" reduces gradients after every micro-batch, "last" only after the last.
        remat: how blocks are recomputed.
        prefetch: whether a unit is gathered while the one before it computes.
        keep: the units that stay gathered from forward to backward: "forward" for all, or bytes that they fit into.
        loss_scale: initial loss scale, and how it changes.
        cast_batch: dtype that floating batch leaves are cast to.
        autocast: dtype to which torch's autocast casts the operands of the operations on its list; without it none are cast.
        stages: the stages along an axis.
        sequence: the axis along which sequences are cut into parts, and how the parts meet.
        tokens: how tokens travel to experts that are dealt out over axes of the mesh.
        update: when states in host memory are updated: one of `UPDATES`.
        layer_drop: which layers a step leaves out.
        token_drop: how many tokens layers see.
    """

    subject_field = ""

    microbatches: int | None = None
    total_microbatches: int | None = None
    sync: str | None = None
    remat: Recompute | None = None
    prefetch: bool | None = None
    keep: str | int | None = None
    loss_scale: LossScale | None = None
    cast_batch: torch.dtype | None = None
    autocast: torch.dtype | None = None
    stages: Stages | None = None
    sequence: SequenceKind | None = None
    tokens: TokenExchange | None = None
    update: str | None = None
    layer_drop: LayerDrop | None = None
    token_drop: TokenDrop | None = None

    def axes(self) -> Iterable[tuple[str, AxisUse]]:
        for axis in self.stages.axes if self.stages else ():
            yield axis, STAGES
        if self.sequence:
            beside = "slices" if self.sequence.gathers_for_slices else "batch"
            yield self.sequence.axis, AxisUse("sequence", "cuts sequences", beside, joins=beside == "slices")

    @staticmethod
    def named(subject: str, slot: str) -> str:
        return f"the schedule's {slot}"

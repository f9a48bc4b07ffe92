"""The plan as a value: where every tensor of the training state lives, and how a step runs. Frozen, device-free, comparable.

`shardlib.plan.plan.Plan` is this with what is counted and printed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.mesh.specs import Leaf
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel
from shardlib.plan.claims import LeafInfo
from shardlib.plan.exchanges import Routes, routes_of
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.numbering import Numbering
from shardlib.plan.placement import Placement
from shardlib.plan.reductions import Reductions
from shardlib.plan.resolved import Resolved
from shardlib.plan.stages import Stages
from shardlib.tree import TreeDef

ROLES = ("param", "grad", "optimizer")


@dataclass(frozen=True)
class Shape:
    """The shape of the parameters' pytree.

    Attributes:
        treedef: its structure.
        paths: the path of every leaf, tied ones included.
        owners: for each of them the index of its placement.
    """

    treedef: TreeDef
    paths: tuple[str, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """What one micro-batch does in one stage.

    Attributes:
        touches: units in the order it gathers them, forward then backward.
        activations: payload bytes that the loss sends itself, by axis.
        live: bytes that it holds at most while it computes, gradients aside.
        kept: bytes that it keeps of the micro-batch from its forward to its backward, the carry that came in included.
        forward, backward: bytes of the carry it passes on, and of the gradient that comes back for it.
    """

    touches: tuple[str, ...]
    activations: Mapping[str, int]
    live: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class StepPlan:
    """How the step is scheduled, all decided: see `shardlib.plan.claims.Step`."""

    microbatches: int
    sync: str
    remat: Any
    prefetch: bool
    loss_scale: LossScale | None
    cast_batch: torch.dtype | None
    sequence: SequenceKind | None


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer takes on the ranks at one coordinate along the stages' axis: bytes that it holds, masters included,
    and payload bytes that it sends in a step, by axis."""

    bytes: int
    payload: Mapping[str, int]


@dataclass(frozen=True)
class Part:
    """What a part of a plan is a part of.

    Attributes:
        whole: the plan of all ranks.
        stages: the stages that the part is of.
        home: the coordinate along the stages' axis, where the part is of all stages there.
    """

    whole: PlanValue = field(compare=False, repr=False)
    stages: tuple[int, ...]
    home: int | None = None


@dataclass(frozen=True)
class PlanValue:
    """A frozen, comparable, device-free description of a sharded training state.

    Attributes:
        sizes: axis name -> size of the mesh.
        shape: the parameters' pytree.
        placements: one per distinct parameter.
        buckets: the flat buffers they lie in, in order of units.
        batch_axes: axes over which the batch varies.
        step: micro-batches, when gradients are reduced, recompute, loss scale and the like, all decided.
        stages: which blocks run where, and in which order.
        reductions: how sums and gathers travel.
        traces: of each of the stages what one micro-batch does; None when not traced.
        needs: of an optimizer, for each coordinate along the stages' axis; None when none was given.
        buffers: dtype and number of elements of what the loss returns beside the loss (BatchNorm's statistics).
        part: what this is a part of; None for the plan of all ranks.
        claims: what the transforms said, all together.
    """

    sizes: Mapping[str, int]
    shape: Shape
    placements: tuple[Placement, ...]
    buckets: tuple[Bucket, ...]
    batch_axes: tuple[str, ...]
    step: StepPlan
    stages: Stages
    reductions: Reductions
    traces: tuple[Trace, ...] | None = None
    needs: tuple[OptimizerNeeds, ...] | None = None
    buffers: tuple[tuple[torch.dtype, int], ...] = ()
    part: Part | None = None
    claims: Resolved | None = field(default=None, compare=False, repr=False)

    # Parts: what one rank holds, what one stage uses.

    @property
    def everywhere(self) -> Self:
        """The plan of all ranks, from a rank's or a stage's part of it."""
        return self if self.part is None else self.part.whole  # type: ignore[return-value]

    @cached_property
    def layout(self) -> Self:
        """The plan as it is before an optimizer is known: what evaluation goes by."""
        return replace(self, needs=None, reductions=replace(self.reductions, owner=None))

    def at(self, coords: Mapping[str, int]) -> Self:
        """What the rank at these coordinates works with: the buckets that live there alone."""
        if self.stages.axis is None:
            return self
        return self.everywhere._homes[self.stages.home(coords)]

    @cached_property
    def views(self) -> tuple[Self, ...]:
        """The plan as each rank along the stages' axis has it; of one stage, or a part, the plan itself."""
        return (self,) if self.stages.axis is None or self.part is not None else self._homes

    @cached_property
    def _homes(self) -> tuple[Self, ...]:
        return tuple(
            replace(
                self,
                buckets=tuple(bucket for bucket in self.buckets if home in bucket.homes),
                needs=None if self.needs is None else self.needs[home : home + 1],
                part=Part(self, stages, home),
            )
            for home, stages in enumerate(self.stages.local)
        )

    @cached_property
    def parts(self) -> tuple[Self, ...]:
        """What runs as one: each of the stages here."""
        return tuple(self.of_stage(stage) for stage in self.own_stages)

    def of_stage(self, stage: int) -> Self:
        """The part of the plan that one stage uses."""
        return self if self.stages.axis is None else self.everywhere._stages[stage]

    @cached_property
    def _stages(self) -> tuple[Self, ...]:
        return tuple(
            replace(
                self,
                buckets=tuple(bucket for bucket in self.buckets if stage in bucket.stages),
                part=Part(self, (stage,)),
            )
            for stage in range(self.stages.count)
        )

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that this part of the plan is of: all of them, of a plan of all ranks."""
        return tuple(range(self.stages.count)) if self.part is None else self.part.stages

    # Axes.

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which losses and weights are summed: those of the batch, and the stages' (one stage has them)."""
        return (*self.batch_axes, *self.stages.axes)

    @property
    def alike(self) -> tuple[str, ...]:
        """Axes along which all ranks run the same: not the stages'."""
        return tuple(axis for axis in self.sizes if axis not in self.stages.axes)

    @cached_property
    def batch_ranks(self) -> int:
        """Ranks that each bring their own share of the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    def copies(self, bucket: Bucket) -> tuple[str, ...]:
        """Axes along which ranks hold the same elements of a bucket in the optimizer's layout."""
        # What several stages hold is its first home's to count: see `counts`.
        own = {*bucket.axes, *bucket.slices, *self.stages.axes}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in own)

    def counts(self, bucket: Bucket, coords: Mapping[str, int]) -> bool:
        """Whether a rank speaks for its bucket's elements: of several homes along the stages' axis, the first."""
        return self.stages.home(coords) == bucket.homes[0]

    # Buckets and leaves.

    @cached_property
    def buckets_of(self) -> dict[str, tuple[Bucket, ...]]:
        """Unit -> its buckets."""
        return _by_unit(self.buckets)

    @cached_property
    def units(self) -> tuple[str, ...]:
        return tuple(self.buckets_of)

    @cached_property
    def trained(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.trainable)

    @cached_property
    def trained_in(self) -> dict[str, tuple[Bucket, ...]]:
        """Unit -> its trained buckets, where it has any."""
        return _by_unit(self.trained)

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """Bucket name -> bucket."""
        return {bucket.name: bucket for bucket in self.buckets}

    @cached_property
    def largest_unit(self) -> int:
        """Elements of the largest unit's trained leaves, padding included."""
        return max((sum(bucket.size(0) for bucket in unit) for unit in self.trained_in.values()), default=0)

    @property
    def parameters(self) -> int:
        """Number of distinct parameters, tied ones counted once."""
        return sum(math.prod(placement.param.shape) for placement in self.placements)

    @cached_property
    def placement_of(self) -> dict[str, Placement]:
        """Path -> placement; by the first path of a tied leaf."""
        return {placement.path: placement for placement in self.placements}

    @cached_property
    def leaves(self) -> tuple[Placement, ...]:
        """The placement of every leaf of the pytree, in its order."""
        return tuple(self.placements[owner] for owner in self.shape.owners)

    @cached_property
    def styles(self) -> dict[str, Style]:
        """Path -> style, of the leaves that have one."""
        return {placement.path: placement.style for placement in self.placements if placement.style}

    def local_shape(self, placement: Placement, role: str) -> tuple[int, ...]:
        """The shape of one rank's shard in ``role`` ("param", or "grad" for the optimizer's layout)."""
        bucket = self.bucket_of[placement.bucket]
        leaf = placement.param if role == "param" else placement.optimizer or placement.param
        level = bucket.param_level if role == "param" else bucket.levels
        shape = leaf.spec.local_shape(leaf.shape, self.sizes)
        part = bucket.chunk_of[placement.path] * bucket.parts(level)
        # Split over several axes, padding is to a multiple of all of them; then the shard is a flat piece.
        return shape if level == 0 or math.prod(shape) == part else (part,)

    @cached_property
    def numbering(self) -> Numbering:
        """The trained leaves by number and by runs."""
        return Numbering(self.buckets, self.everywhere.trained, self.placements)

    def select(self, choice: Callable[[LeafInfo], bool]) -> Self:
        """The plan of some of the trained leaves: their buckets, cut into runs of them.

        Kept for the next time, so ``choice`` is hashable.
        """
        if choice not in self._selected:
            part = self.part and replace(self.part, whole=self.part.whole.select(choice))
            self._selected[choice] = replace(self, buckets=self.numbering.runs(choice), part=part)
        return self._selected[choice]

    @cached_property
    def _selected(self) -> dict[Callable[[LeafInfo], bool], Self]:
        return {}

    # Exchanges.

    @cached_property
    def routes(self) -> dict[str, Routes]:
        """Bucket name -> what is sent of it in a step."""
        return {bucket.name: routes_of(bucket, self.reductions, self.sizes) for bucket in self.buckets}

    @cached_property
    def gathers(self) -> tuple[str, ...]:
        """Units in the order one micro-batch gathers them: as traced, or each once forward and once backward."""
        if self.traces is not None:
            return tuple(unit for stage in self.own_stages for unit in self.traces[stage].touches)
        sharded = [unit for unit, buckets in self.buckets_of.items() if any(b.param_level for b in buckets)]
        return (*sharded, *(unit for unit in reversed(sharded) if unit in self.trained_in))

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Where gradients are compressed, the optimizer's own channels last."""
        routes = [self.routes[bucket.name] for bucket in self.trained]
        found = [exchange.channel for route in routes for exchange in route.reductions if exchange.channel]
        return (*found, *(route.mean.channel for route in routes if route.mean and route.mean.channel))

    @cached_property
    def residuals(self) -> tuple[Leaf, ...]:
        """What compressed communication remembers: the leaves of ``TrainState.comm``."""
        return tuple(leaf for channel in self.channels for leaf in channel.leaves(self.sizes))


def _by_unit(buckets: tuple[Bucket, ...]) -> dict[str, tuple[Bucket, ...]]:
    found: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.unit, []).append(bucket)
    return {unit: tuple(members) for unit, members in found.items()}

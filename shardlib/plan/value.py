"""The plan as a value: where every tensor of the training state lives, and how a step runs. Frozen, device-free, comparable.

`shardlib.plan.plan.Plan` adds to it what users count and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

import torch

from shardlib.collectives.styles.base import Style
from shardlib.mesh.specs import Leaf
from shardlib.plan.buckets import Bucket, run_of
from shardlib.plan.claims import LeafInfo
from shardlib.plan.drops import DropPlan
from shardlib.plan.exchanges import Channel, Reductions, Routes, routes_of
from shardlib.plan.placement import Placement
from shardlib.plan.records import OptimizerNeeds, Shape, StepPlan, Trace
from shardlib.plan.stages import Stages
from shardlib.plan.transform import Resolved
from shardlib.rng import Key


@dataclass(frozen=True)
class PlanPart:
    """The subject of a partial plan: one stage, or the ranks at one coordinate along the stages' axis.

    Attributes:
        whole: the plan of all ranks.
        stages: the stages that the partial plan covers.
        home: the coordinate along the stages' axis; None in the plan of one stage.
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
        buckets: the flat buffers that hold the parameters, in order of units.
        batch_axes: axes over which the batch varies.
        step: micro-batches, when gradients are reduced, recompute, loss scale and the like.
        stages: which blocks run where, and in which order.
        reductions: codecs of sums and gathers, by axis.
        traces: what one micro-batch does in each stage; None when the plan was not traced.
        needs: what the optimizer needs at each coordinate along the stages' axis; None without an optimizer.
        buffers: dtype and number of elements of each buffer that the loss returns (BatchNorm's statistics).
        left_out: units that are neither gathered nor reduced: in the plan of one step that leaves out layers.
        part: the subject of a partial plan; None for the plan of all ranks.
        claims: the resolved claims of all transforms.
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
    buffers: tuple[tuple[torch.dtype, int, bool], ...] = ()
    left_out: frozenset[str] = frozenset()
    part: PlanPart | None = None
    claims: Resolved | None = field(default=None, compare=False, repr=False)

    # Parts: plans of some of the ranks, or of one stage.

    @property
    def everywhere(self) -> Self:
        """The plan of all ranks that this plan is, or is a part of."""
        return self if self.part is None else self.part.whole  # type: ignore[return-value]

    @cached_property
    def layout(self) -> Self:
        """The plan without what an optimizer adds to it, for evaluation."""
        claims = self.claims and self.claims.without_owner()
        return replace(self, needs=None, reductions=replace(self.reductions, owner=None), claims=claims)

    def at(self, coords: Mapping[str, int]) -> Self:
        """The part of the plan for the rank at these coordinates: with the buckets that it holds, and no others."""
        if self.stages.axis is None:
            return self
        return self.everywhere._homes[self.stages.home(coords)]

    @cached_property
    def views(self) -> tuple[Self, ...]:
        """The part of the plan for each rank along the stages' axis; the plan itself if it has one stage or is a part."""
        return (self,) if self.stages.axis is None or self.part is not None else self._homes

    @cached_property
    def _homes(self) -> tuple[Self, ...]:
        return tuple(
            replace(
                self,
                buckets=tuple(bucket for bucket in self.buckets if home in bucket.homes),
                needs=None if self.needs is None else self.needs[home : home + 1],
                part=PlanPart(self, stages, home),
            )
            for home, stages in enumerate(self.stages.local)
        )

    def of_stage(self, stage: int) -> Self:
        """The part of the plan for one stage: with the buckets that it uses, and no others."""
        return self if self.stages.axis is None else self.everywhere._stages[stage]

    @cached_property
    def _stages(self) -> tuple[Self, ...]:
        return tuple(
            replace(
                self,
                buckets=tuple(bucket for bucket in self.buckets if stage in bucket.stages),
                part=PlanPart(self, (stage,)),
            )
            for stage in range(self.stages.count)
        )

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages that this plan covers: all of them, unless it is a part."""
        return tuple(range(self.stages.count)) if self.part is None else self.part.stages

    # Axes.

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which losses and weights are summed: the batch's, and the stages' (one stage computes the loss)."""
        return (*self.batch_axes, *self.stages.axes)

    @property
    def uniform_axes(self) -> tuple[str, ...]:
        """Axes along which all ranks run the same code: all but the stages' axis."""
        return tuple(axis for axis in self.sizes if axis not in self.stages.axes)

    @cached_property
    def batch_ranks(self) -> int:
        """Number of ranks with different shares of the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    def copies(self, bucket: Bucket) -> tuple[str, ...]:
        """Axes along which ranks hold the same elements of a bucket in the optimizer's layout."""
        # Of a bucket that several homes hold, the first home's elements are counted: see `counts`.
        differing = {*bucket.axes, *bucket.slices, *self.stages.axes}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in differing)

    def counts(self, bucket: Bucket, coords: Mapping[str, int]) -> bool:
        """Whether sums over all ranks count a rank's elements of a bucket: those of the bucket's first home do."""
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
        """Unit -> its trained buckets, for units that have any."""
        return _by_unit(self.trained)

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """Bucket name -> bucket."""
        return {bucket.name: bucket for bucket in self.buckets}

    def units_left_out(self, drops: DropPlan | None) -> frozenset[str]:
        """The units that a step leaves out: those with leaves of left out layers alone."""
        if drops is None or not drops.dropped:
            return frozenset()

        def gone(path: str) -> bool:
            return all(map(drops.leaves_out, (path, *self.placement_of[path].aliases)))

        members = self.buckets_of.items()
        return frozenset(unit for unit, buckets in members if all(gone(path) for b in buckets for path in b.paths))

    def at_step(self, step: int, key: Key) -> Self:
        """The plan of one step, with what it leaves out by its key."""
        return replace(self, left_out=self.tiled.units_left_out(self.step.drops(step, key)))

    @cached_property
    def largest_unit(self) -> int:
        """Elements of the largest unit's trained leaves, padding included."""
        return max((sum(bucket.size(0) for bucket in unit) for unit in self.trained_in.values()), default=0)

    @property
    def most_in_flight(self) -> int:
        """Elements of gradients that may be on their way to other ranks, or to another memory: before more follow, the first
        must arrive."""
        return 2 * self.largest_unit

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters, tied leaves counted once."""
        return sum(math.prod(placement.param.shape) for placement in self.placements)

    @cached_property
    def computed_dtype(self) -> torch.dtype:
        """The dtype of most parameters, but for those that nothing computes with as they are: codes of few bits, integers,
        complex numbers, of which a frozen leaf may be."""
        elements: dict[torch.dtype, int] = {}
        for bucket in self.buckets:
            if bucket.dtype.is_floating_point and bucket.dtype.itemsize > 1:
                elements[bucket.dtype] = elements.get(bucket.dtype, 0) + sum(bucket.numels)
        return max(elements, key=lambda dtype: elements[dtype])

    @cached_property
    def placement_of(self) -> dict[str, Placement]:
        """Path -> placement; a tied leaf stands under its first path."""
        return {placement.path: placement for placement in self.placements}

    @cached_property
    def leaves(self) -> tuple[Placement, ...]:
        """The placement of every leaf of the pytree, in the pytree's order."""
        return tuple(self.placements[owner] for owner in self.shape.owners)

    @cached_property
    def styles(self) -> dict[str, Style]:
        """Path -> style, for leaves that have a style."""
        return {placement.path: placement.style for placement in self.placements if placement.style}

    def local_shape(self, placement: Placement, role: str) -> tuple[int, ...]:
        """The shape of one rank's shard of a leaf in ``role`` ("param", or "grad" for the optimizer's layout)."""
        bucket = self.bucket_of[placement.bucket]
        leaf = placement.param if role == "param" else placement.optimizer or placement.param
        level = bucket.param_level if role == "param" else bucket.levels
        shape = leaf.spec.local_shape(leaf.shape, self.sizes)
        held = bucket.chunk_of[placement.path] * bucket.owners(level)
        # A bucket over several axes is padded to a multiple of all their sizes; a shard with such padding is flat.
        return shape if level == 0 or math.prod(shape) == held else (held,)

    @cached_property
    def numbering(self) -> Numbering:
        """Numbers and runs of the trained leaves."""
        return Numbering(self)

    def select(self, choice: Callable[[LeafInfo], bool]) -> Self:
        """The plan of the trained leaves that ``choice`` accepts: each run of them in a bucket is a bucket.

        Results are cached by ``choice``, which must be hashable.
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
    def tiled(self) -> Self:
        """The plan as a step runs it: every tile of a leaf (see `Bucket.cut`) is a bucket and a unit.

        The state is laid out by the plan itself, in which the leaf is one bucket.
        """
        if all(bucket.tiles == 1 for bucket in self.buckets):
            return self
        return replace(self, buckets=tuple(tile for bucket in self.buckets for tile in bucket.cut))

    @cached_property
    def routes(self) -> dict[str, Routes]:
        """Bucket name -> the exchanges of the bucket in a step."""
        return {bucket.name: routes_of(bucket, self.reductions, self.sizes) for bucket in self.buckets}

    def lands_each(self, bucket: Bucket) -> bool:
        """Whether the bucket's gradients are accumulated in another memory than the device's, to which that of each
        micro-batch goes: where no exchange is left for the last one."""
        left = self.routes[bucket.name].last or self.step.tree or len(bucket.stages) > 1
        return bucket.memory.grad != "device" and not left

    @cached_property
    def touches(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Units in the order in which one micro-batch gathers them in forward, and in backward: as traced, or once each."""
        if self.traces is not None:
            traced = [seen for stage in self.local_stages if (seen := self.traces[stage].touches) is not None]
            if traced:
                forward, backward = zip(*traced, strict=True)
                return tuple(chain(*forward)), tuple(chain(*backward))
        plan, first = self.tiled, self.traces is not None  # the first is not needed in backward, perhaps
        here = ((unit, buckets) for unit, buckets in plan.buckets_of.items() if unit not in plan.left_out)
        sharded = tuple(unit for unit, buckets in here if any(b.fetched for b in buckets))
        again = (unit for unit in sharded[first:][::-1] if unit in plan.trained_in and unit not in plan.kept)
        return sharded, tuple(again)

    @property
    def gathers(self) -> tuple[str, ...]:
        """Units in the order in which one micro-batch gathers them: see `touches`."""
        forward, backward = self.touches
        return (*forward, *backward)

    @cached_property
    def kept(self) -> dict[str, int]:
        """Unit -> bytes, for the units that stay gathered from a micro-batch's forward until backward has used them: as many
        as fit, the smallest first, of equal ones the last. Tiles, which are never together on the device, do not stay."""
        keep, sizes = self.step.keep, dict[str, int]()
        for unit, buckets in self.tiled.buckets_of.items():
            gathered = sum(bucket.size(0) * bucket.dtype.itemsize for bucket in buckets if bucket.fetched)
            if keep is not None and gathered and buckets[0].home is None:
                sizes[unit] = gathered
        if not isinstance(keep, int):
            return sizes
        found, left = dict[str, int](), keep
        for size, _, unit in sorted((size, -place, unit) for place, (unit, size) in enumerate(sizes.items())):
            if size <= left:
                found[unit] = size
                left -= size
        return found

    @cached_property
    def programs(self) -> dict[bool, Any]:
        """Whether the optimizer sums over its axis itself -> the `shardlib.plan.program.Program` that was made."""
        return {}

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The compressed exchanges of gradients, with those that an optimizer makes itself last."""
        routes = [self.routes[bucket.name] for bucket in self.trained]
        sums = [exchange.channel for route in routes for exchange in route.reductions if exchange.channel]
        return (*sums, *(route.mean.channel for route in routes if route.mean and route.mean.channel))

    @cached_property
    def residuals(self) -> tuple[Leaf, ...]:
        """The leaves of ``TrainState.comm``: what compressed exchanges keep from step to step."""
        return tuple(leaf for channel in self.channels for leaf in channel.leaves(self.sizes))


def _by_unit(buckets: tuple[Bucket, ...]) -> dict[str, tuple[Bucket, ...]]:
    units: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        units.setdefault(bucket.unit, []).append(bucket)
    return {unit: tuple(members) for unit, members in units.items()}


class Numbering:
    """Numbers of a plan's trained leaves, the same on every mesh, and the runs of leaves that lie side by side in buckets."""

    def __init__(self, plan: PlanValue) -> None:
        self._plan = plan

    @cached_property
    def infos(self) -> dict[str, LeafInfo]:
        """Path -> global shape and dtype of the leaf, for the trained leaves of all ranks, in the tree's order."""
        trained = {path for bucket in self._plan.everywhere.trained for path in bucket.paths}
        return {
            leaf.path: LeafInfo(leaf.path, leaf.compute.shape, leaf.compute.dtype, leaf.aliases)
            for leaf in self._plan.placements
            if leaf.path in trained
        }

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path -> number, for the trained leaves of all ranks."""
        return {path: number for number, path in enumerate(self.infos)}

    def runs(self, choice: Callable[[LeafInfo], bool]) -> tuple[Bucket, ...]:
        """The runs of trained leaves that ``choice`` accepts, each as a bucket of its own."""
        return tuple(run for bucket in self._plan.trained for run in self._runs(bucket, choice))

    def _runs(self, bucket: Bucket, choice: Callable[[LeafInfo], bool]) -> list[Bucket]:
        chosen = [choice(self.infos[path]) for path in bucket.paths]
        starts = [i for i, taken in enumerate(chosen) if taken and not (i and chosen[i - 1])]
        stops = [i + 1 for i, taken in enumerate(chosen) if taken and not (chosen[i + 1 :] or [False])[0]]
        return [bucket.run(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def run_named(self, name: object) -> tuple[str, Bucket] | None:
        """The bucket and the run that ``name`` stands for; None when it is the name of neither a bucket nor a run."""
        if name in self._plan.bucket_of:
            return str(name), self._plan.bucket_of[str(name)]
        found = run_of(name) if isinstance(name, str) else None
        if found is None or found[0] not in self._plan.bucket_of:
            return None
        whole, first, stop = found
        return whole, self._plan.bucket_of[whole].run(first, stop)

    def run_along(self, path: Sequence[object]) -> tuple[str, Bucket] | None:
        """`run_named` of the last entry of a path that is such a name: a leaf may be a part of what stands for a run."""
        return next(filter(None, map(self.run_named, reversed(path))), None)

    def bucket_with(self, path: object) -> str | None:
        """The name of the bucket that holds the leaf at ``path``; None for what is no such path."""
        return self._bucket_with[str(path)].name if path in self._bucket_with else None

    def span(self, run: Bucket) -> tuple[str, int, int]:
        """The name of the bucket that holds ``run``, and the run's start and stop in one rank's elements of that bucket."""
        bucket = self._bucket_with[run.paths[0]]
        first = bucket.paths.index(run.paths[0])
        start = sum(bucket.chunks[:first])
        return bucket.name, start, start + run.owned

    @cached_property
    def _bucket_with(self) -> dict[str, Bucket]:
        return {path: bucket for bucket in self._plan.buckets for path in bucket.paths}

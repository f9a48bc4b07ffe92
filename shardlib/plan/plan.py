"""The plan: a frozen description of where every tensor of the training state lives, and what a step sends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.codecs.integers import Packing
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.errors import TreeError, listing
from shardlib.mesh.specs import Leaf
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel, channels
from shardlib.plan.claims import LeafInfo
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.payload import payload
from shardlib.plan.placement import OwnedAxis, Placement, StageTrace
from shardlib.plan.text import describe
from shardlib.schedules import Pipeline, peak_of_stages
from shardlib.tree import TreeDef

ROLES = ("param", "grad", "optimizer")


@dataclass(frozen=True)
class Plan:
    """A frozen, comparable, device-free description of a sharded training state; ``print`` it.

    Attributes:
        sizes: axis name -> size of the mesh.
        treedef: the parameters' structure.
        leaf_paths: the path of every leaf of the pytree, tied ones included.
        owners: for each of them the index of its placement.
        placements: one per distinct parameter.
        buckets: the flat buffers they lie in, in order of units.
        batch_axes: axes over which the batch varies.
        microbatches: parts a rank's batch is cut into; gradients are summed over them.
        sync: "each" reduces gradients after every micro-batch, "last" only after the last.
        remat: activation recompute policy of blocks, or None.
        prefetch: whether the next unit is gathered while one computes.
        loss_scale: what losses are multiplied by at first, and how that changes; or None.
        cast_batch: dtype that floating batch leaves are cast to, or None.
        sequence: over which axis sequences are cut, and how; or None.
        codecs: axis -> how gradients travel over it, where that is not as they are.
        packings: axis -> in how many bits parameters travel when they are gathered.
        second_level: the level at which gathered parameters are kept from forward to backward, or None.
        owned: the axis that the optimizer sums over itself, or None.
        touches: units in the order one micro-batch gathers them, forward then backward; None when not traced.
        activations: payload bytes of activations that one micro-batch sends, by axis; None when not traced.
        live: bytes that one micro-batch holds at most beside what `bytes` counts; None when not traced. See
            `live_bytes`, which knows pipelines too.
        optimizer_bytes: bytes per rank of the optimizer's state, masters included, one number for each of the
            `views`; None when no optimizer was given.
        optimizer_payload: payload bytes by axis that the optimizer itself sends in a step, for each of the `views`; None
            when no optimizer was given.
        buffers: dtype and number of elements of what the loss returns beside the loss (BatchNorm's statistics).
        pipeline: the stages and their schedule, or None.
        traces: of each of the stages, when traced.
        whole: of a part of a plan, the plan it is a part of.
        home: of the part that `at` gives, the coordinate along the pipeline's axis.
        log: which transform wrote what.
    """

    sizes: Mapping[str, int]
    treedef: TreeDef
    leaf_paths: tuple[str, ...]
    owners: tuple[int, ...]
    placements: tuple[Placement, ...]
    buckets: tuple[Bucket, ...]
    batch_axes: tuple[str, ...]
    microbatches: int
    sync: str
    remat: Any
    prefetch: bool
    loss_scale: LossScale | None
    cast_batch: torch.dtype | None
    sequence: SequenceKind | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    second_level: int | None = None
    owned: OwnedAxis | None = field(default=None, compare=False)  # of the optimizer, not of the layout
    touches: tuple[str, ...] | None = None
    activations: Mapping[str, int] | None = None
    live: int | None = None
    optimizer_bytes: tuple[int, ...] | None = None
    optimizer_payload: tuple[Mapping[str, int], ...] | None = None
    buffers: tuple[tuple[torch.dtype, int], ...] = ()
    pipeline: Pipeline | None = None
    traces: tuple[StageTrace, ...] | None = None
    home: int | None = None
    whole: Plan | None = field(default=None, compare=False, repr=False)
    log: tuple[str, ...] = field(default=(), compare=False)

    @property
    def everywhere(self) -> Plan:
        """The plan of all ranks, from a rank's or a stage's part of it."""
        return self.whole or self

    @cached_property
    def layout(self) -> Plan:
        """The plan as it is before an optimizer is known: what evaluation goes by."""
        return replace(self, owned=None, optimizer_bytes=None, optimizer_payload=None)

    def at(self, coords: Mapping[str, int]) -> Plan:
        """What the rank at these coordinates works with: under a pipeline, the buckets that live there alone."""
        if self.pipeline is None:
            return self
        home = coords[self.pipeline.axis]
        spent, sent = self.everywhere.optimizer_bytes, self.everywhere.optimizer_payload
        return replace(
            self._part(lambda bucket: home in bucket.homes),
            home=home,
            optimizer_bytes=None if spent is None else spent[home : home + 1],
            optimizer_payload=None if sent is None else sent[home : home + 1],
        )

    def of_stage(self, stage: int) -> Plan:
        """The part of the plan that one stage of the pipeline uses."""
        part = self._part(lambda bucket: stage in bucket.stages)
        if self.traces is None:
            return part
        return replace(part, touches=self.traces[stage].touches, activations=self.traces[stage].activations)

    def _part(self, keep: Callable[[Bucket], bool]) -> Plan:
        whole = self.everywhere
        return replace(whole, buckets=tuple(bucket for bucket in whole.buckets if keep(bucket)), whole=whole)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which losses and weights are summed: those of the batch, and the pipeline's (one stage has them)."""
        return self.batch_axes if self.pipeline is None else (*self.batch_axes, self.pipeline.axis)

    @property
    def alike(self) -> tuple[str, ...]:
        """Axes along which all ranks run the same: not the pipeline's."""
        return tuple(axis for axis in self.sizes if self.pipeline is None or axis != self.pipeline.axis)

    @cached_property
    def views(self) -> tuple[Plan, ...]:
        """The plan as each rank along the pipeline's axis has it; without a pipeline, the plan itself."""
        if self.pipeline is None or self.home is not None:
            return (self,)
        return tuple(self.at({self.pipeline.axis: home}) for home in range(self.sizes[self.pipeline.axis]))

    @cached_property
    def units(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(bucket.unit for bucket in self.buckets))

    @cached_property
    def batch_ranks(self) -> int:
        """Ranks that each bring their own share of the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @cached_property
    def trained(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.trainable)

    @cached_property
    def trained_in(self) -> dict[str, tuple[Bucket, ...]]:
        """Unit -> its trained buckets, where it has any."""
        found: dict[str, tuple[Bucket, ...]] = {}
        for bucket in self.trained:
            found[bucket.unit] = (*found.get(bucket.unit, ()), bucket)
        return found

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Where gradients are compressed, the optimizer's own channels last."""
        found = [channel for bucket in self.trained for channel in channels(bucket, self.codecs, self.sizes)]
        return (*found, *(self.owned_channels if self.owned else ()))

    @cached_property
    def owned_channels(self) -> tuple[Channel, ...]:
        """Those of the optimizer that owns an axis."""
        assert self.owned is not None
        axis, codec = self.owned.axis, self.owned.codec
        if self.sizes[axis] == 1:
            return ()
        return tuple(Channel(bucket, axis, self.sizes[axis], codec, None, mean=True) for bucket in self.trained)

    @cached_property
    def channel_payload(self) -> dict[tuple[str, str], int]:
        """Bytes a rank sends through each channel of gradients, by bucket and axis."""
        return {(channel.bucket.name, channel.axis): channel.payload for channel in self.channels if not channel.mean}

    @cached_property
    def errors(self) -> tuple[Leaf, ...]:
        """What compressed communication remembers: the leaves of ``TrainState.comm``."""
        return tuple(leaf for channel in self.channels for leaf in channel.leaves(self.sizes))

    @cached_property
    def largest_unit(self) -> int:
        """Elements of the largest unit's trained leaves, padding included."""
        return max((sum(bucket.size(0) for bucket in unit) for unit in self.trained_in.values()), default=0)

    @property
    def parameters(self) -> int:
        """Number of distinct parameters, tied ones counted once."""
        return sum(math.prod(placement.param.shape) for placement in self.placements)

    def bytes(self, role: str) -> int:
        """Bytes one rank holds of "param", "grad", "optimizer", "comm" or "buffers", padding included; or "total", of all.

        "grad" is the buffer gradients are accumulated in: whole where they are reduced once at the end. Under a
        pipeline, what the rank that holds most holds; see `at` for the others.
        """
        if len(self.views) > 1:
            return max(view.bytes(role) for view in self.views)
        if role == "param":
            return sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in self.buckets)
        if role == "grad":
            return sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in self.trained)
        if role == "optimizer":
            if self.optimizer_bytes is None:
                raise ValueError("the plan was made without an optimizer; pass optimizer= to make_plan")
            return max(self.optimizer_bytes)
        if role == "comm":
            return sum(channel.bytes for channel in self.channels)
        if role == "buffers":
            return sum(numel * dtype.itemsize for dtype, numel in self.buffers)
        if role == "total":
            known = ROLES if self.optimizer_bytes is not None else ROLES[:2]
            return sum(self.bytes(part) for part in (*known, "comm", "buffers"))
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}, comm, buffers, total")

    @cached_property
    def live_bytes(self) -> int | None:
        """Bytes that a rank holds at most beside `bytes`, of a micro-batch; None when not traced.

        That is what operations make, in the first step or a later one: activations and their gradients, passing results,
        gathered parameters, gradients before they are split. It is that of the first of several micro-batches, and leaves
        out what an operation needs only inside itself, what an optimizer does, and gradients that wait for the network.
        Under a pipeline it is a bound, of the rank that holds most: what all micro-batches keep that are on their way, and
        what one that computes needs beyond.
        """
        if self.pipeline is None:
            return self.live
        if self.traces is None:
            return None
        if len(self.views) > 1:
            return max(view.live_bytes or 0 for view in self.views)
        held, traces = peak_of_stages(self.pipeline.schedule), self.traces
        kept = sum(held[stage] * traces[stage].kept for stage in self.local_stages)
        return kept + max(traces[stage].live - traces[stage].kept for stage in self.local_stages)

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """Bucket name -> bucket."""
        return {bucket.name: bucket for bucket in self.buckets}

    def select(self, choice: Callable[[LeafInfo], bool]) -> Plan:
        """The plan of some of the trained leaves: their buckets, cut into runs of them.

        Kept for the next time, so ``choice`` is hashable.
        """
        if choice not in self._selected:
            whole = self.whole and self.whole.select(choice)
            parts = tuple(part for bucket in self.trained for part in self._runs(bucket, choice))
            self._selected[choice] = replace(self, buckets=parts, whole=whole)
        return self._selected[choice]

    @cached_property
    def _selected(self) -> dict[Callable[[LeafInfo], bool], Plan]:
        return {}

    def _runs(self, bucket: Bucket, choice: Callable[[LeafInfo], bool]) -> list[Bucket]:
        chosen = [choice(self.infos[path]) for path in bucket.paths]
        starts = [i for i, taken in enumerate(chosen) if taken and not (i and chosen[i - 1])]
        stops = [i + 1 for i, taken in enumerate(chosen) if taken and not (chosen[i + 1 :] or [False])[0]]
        return [bucket.part(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def part_named(self, name: object) -> tuple[str, Bucket] | None:
        """The bucket that ``name`` is of, and what part of it, when it is the name of a bucket or of a run of its leaves."""
        if name in self.bucket_of:
            return str(name), self.bucket_of[str(name)]
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name) if isinstance(name, str) else None
        if found is None or found[1] not in self.bucket_of:
            return None
        return found[1], self.bucket_of[found[1]].part(int(found[2]), int(found[3]))

    def span(self, part: Bucket) -> tuple[str, int, int]:
        """The bucket that ``part`` is a part of, and from where to where it lies in what one rank owns of that."""
        bucket = self._bucket_with[part.paths[0]]
        first = bucket.paths.index(part.paths[0])
        start = sum(bucket.chunks[:first])
        return bucket.name, start, start + part.owned

    @cached_property
    def _bucket_with(self) -> dict[str, Bucket]:
        return {path: bucket for bucket in self.buckets for path in bucket.paths}

    @cached_property
    def infos(self) -> dict[str, LeafInfo]:
        """Path -> what the leaf is as a whole; of the trained leaves of all ranks, in the order of their numbers."""
        leaves = [self.placement_of[path] for path in self.numbers]
        return {leaf.path: LeafInfo(leaf.path, leaf.compute.shape, leaf.compute.dtype, leaf.aliases) for leaf in leaves}

    @cached_property
    def placement_of(self) -> dict[str, Placement]:
        """Path -> placement; by the first path of a tied leaf."""
        return {placement.path: placement for placement in self.placements}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path -> number, of the trained parameters of all ranks: in the tree's order, which is the same on every mesh."""
        trained = {path for bucket in self.everywhere.trained for path in bucket.paths}
        paths = [placement.path for placement in self.placements if placement.path in trained]
        return {path: number for number, path in enumerate(paths)}

    def local_shape(self, placement: Placement, role: str) -> tuple[int, ...]:
        """The shape of one rank's shard in ``role`` ("param", or "grad" for the optimizer's layout)."""
        bucket = self.bucket_of[placement.bucket]
        leaf = placement.param if role == "param" else placement.optimizer or placement.param
        level = bucket.param_level if role == "param" else bucket.levels
        shape = leaf.spec.local_shape(leaf.shape, self.sizes)
        part = bucket.chunks[bucket.paths.index(placement.path)] * bucket.parts(level)
        # Split over several axes, padding is to a multiple of all of them; then the shard is a flat piece.
        return shape if level == 0 or math.prod(shape) == part else (part,)

    @cached_property
    def styles(self) -> dict[str, Style]:
        """Path -> style, of the leaves that have one."""
        return {placement.path: placement.style for placement in self.placements if placement.style}

    def copies(self, bucket: Bucket) -> tuple[str, ...]:
        """Axes along which ranks hold the same elements of a bucket in the optimizer's layout."""
        own = {*bucket.axes, *bucket.slices}
        if self.pipeline is not None:
            own.add(self.pipeline.axis)  # what several stages hold is its first home's to count: see `counts`
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in own)

    def counts(self, bucket: Bucket, coords: Mapping[str, int]) -> bool:
        """Whether a rank speaks for its bucket's elements: of several homes along the pipeline's axis, the first."""
        return self.pipeline is None or coords[self.pipeline.axis] == bucket.homes[0]

    def gathers(self) -> tuple[str, ...]:
        """Units in the order one micro-batch gathers them: as traced, or each once forward and once backward."""
        if self.touches is not None:
            return self.touches
        if self.pipeline is not None and self.traces is not None:
            stages = range(len(self.traces)) if self.home is None else self.local_stages
            return tuple(unit for stage in stages for unit in self.traces[stage].touches)
        sharded = [unit for unit in self.units if any(b.param_level for b in self.buckets if b.unit == unit)]
        trained = {bucket.unit for bucket in self.trained}
        return (*sharded, *(unit for unit in reversed(sharded) if unit in trained))

    def payload(self, *, owned: bool = False) -> dict[str, int]:
        """Payload bytes one rank sends per step, by axis, by the algorithms' own volume (scalars apart).

        ``owned``: of a step whose optimizer sums over its own axis itself (1-bit Adam, once its variance is frozen).

        With what the loss sends itself (activations) where the plan was traced, and what the optimizer does (whole leaves,
        sums of rows) where it was made with one.
        Under a pipeline, by axis what the rank that sends most sends; what passes between stages only when traced.
        """
        return payload(self, owned)

    @cached_property
    def parts(self) -> tuple[Plan, ...]:
        """What runs as one: each of a rank's stages (see `at`); without a pipeline, the plan itself."""
        if self.pipeline is None:
            return (self,)
        return tuple(self.everywhere.of_stage(stage) for stage in self.local_stages)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of the pipeline that run where this part of the plan belongs."""
        assert self.pipeline is not None
        return self.pipeline.schedule.stages_of(self.home or 0)

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__


def check_same_tree(
    plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], what: str, *, whole: bool = False
) -> None:
    """Raise `TreeError` listing each leaf of ``what`` that is missing, new, or of another shape than the plan's.

    Shapes are of this rank's shards, or of ``whole`` leaves.
    """
    owners = (plan.placements[owner] for owner in plan.owners)
    # Other stages' leaves are None in a rank's tree.
    wanted = {
        path: owner for path, owner in zip(plan.leaf_paths, owners, strict=True) if owner.bucket in plan.bucket_of
    }
    got = dict(zip(paths, shapes, strict=True))
    failures = [f"{path}: missing" for path in wanted if path not in got]
    failures += [f"{path}: not in the plan" for path in got if path not in wanted]
    for path, placement in wanted.items():
        planned = placement.compute.shape if whole else plan.local_shape(placement, "param")
        if path in got and got[path] != planned:
            share = "" if whole else f" (this rank's share of {placement.param.shape})"
            failures.append(f"{path}: shape {got[path]}, planned {planned}{share}")
    if failures:
        raise TreeError(
            f"the {what} differ from the plan:\n{listing(failures)}\nShard the changed tree anew with sl.shard."
        )

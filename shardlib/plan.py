"""The plan: a frozen description of where every tensor of the training state lives, and what a step sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from shardlib.errors import TreeError, listing
from shardlib.layout import Bucket
from shardlib.parts import SequencePlan
from shardlib.plan_text import describe
from shardlib.specs import Leaf
from shardlib.styles import Style
from shardlib.tree import TreeDef

ROLES = ("param", "grad", "optimizer")


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives in each role.

    Attributes:
        path: its first path; ``aliases`` are further paths of a tied leaf.
        unit, bucket: the unit and the bucket that hold it.
        compute: as the loss sees it.
        style: how its slices work together, or None.
        param, grad, optimizer: as it is stored; grad and optimizer are None for a leaf that is not trained.
    """

    path: str
    aliases: tuple[str, ...]
    unit: str
    bucket: str
    compute: Leaf
    param: Leaf
    grad: Leaf | None
    optimizer: Leaf | None
    style: Style | None = None


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
        loss_scale: None, or "dynamic" for fp16.
        cast_batch: dtype that floating batch leaves are cast to, or None.
        sequence: over which axis sequences are cut, and how; or None.
        touches: units in the order one micro-batch gathers them, forward then backward; None when not traced.
        activations: payload bytes of activations that one micro-batch sends, by axis; None when not traced.
        optimizer_bytes: bytes per rank of the optimizer's state, masters included; None when none was given.
        buffers: dtype and number of elements of what the loss returns beside the loss (BatchNorm's statistics).
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
    loss_scale: str | None
    cast_batch: torch.dtype | None
    sequence: SequencePlan | None = None
    touches: tuple[str, ...] | None = None
    activations: Mapping[str, int] | None = None
    optimizer_bytes: int | None = None
    buffers: tuple[tuple[torch.dtype, int], ...] = ()
    log: tuple[str, ...] = field(default=(), compare=False)

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
    def largest_unit(self) -> int:
        """Elements of the largest unit's trained leaves, padding included."""
        return max((sum(bucket.size(0) for bucket in unit) for unit in self.trained_in.values()), default=0)

    @property
    def parameters(self) -> int:
        """Number of distinct parameters, tied ones counted once."""
        return sum(math.prod(placement.param.shape) for placement in self.placements)

    def bytes(self, role: str) -> int:
        """Bytes one rank holds of "param", "grad", "optimizer" or "buffers", padding included.

        "grad" is the buffer gradients are accumulated in: whole where they are reduced once at the end.
        """
        if role == "param":
            return sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in self.buckets)
        if role == "grad":
            return sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in self.trained)
        if role == "optimizer":
            if self.optimizer_bytes is None:
                raise ValueError("the plan was made without an optimizer; pass optimizer= to make_plan")
            return self.optimizer_bytes
        if role == "buffers":
            return sum(numel * dtype.itemsize for dtype, numel in self.buffers)
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}, buffers")

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """Bucket name -> bucket."""
        return {bucket.name: bucket for bucket in self.buckets}

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
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in own)

    def gathers(self) -> tuple[str, ...]:
        """Units in the order one micro-batch gathers them: as traced, or each once forward and once backward."""
        if self.touches is not None:
            return self.touches
        sharded = [unit for unit in self.units if any(b.param_level for b in self.buckets if b.unit == unit)]
        trained = {bucket.unit for bucket in self.trained}
        return (*sharded, *(unit for unit in reversed(sharded) if unit in trained))

    def payload(self) -> dict[str, int]:
        """Payload bytes one rank sends per step, by axis, by the algorithms' own volume (scalars apart).

        With what the loss sends itself (activations) where the plan was traced.
        """
        total = {axis: self.microbatches * (self.activations or {}).get(axis, 0) for axis in self.sizes}
        reductions = self.microbatches if self.sync == "each" else 1
        for unit in self.gathers():
            for bucket in self.buckets:
                if bucket.unit == unit:
                    _add_gather(total, bucket, 0, bucket.param_level, self.microbatches)
        for bucket in self.trained:
            itemsize = bucket.reduce_dtype.itemsize
            for level, axis in enumerate(bucket.axes):
                times = reductions if level < bucket.grad_level else 1
                total[axis] += times * _share(bucket.size(level) * itemsize, self.sizes[axis])
            for axis in bucket.replicas:
                total[axis] += _share(2 * bucket.size(bucket.levels) * itemsize, self.sizes[axis])
            _add_gather(total, bucket, bucket.param_level, bucket.levels, 1)
        for dtype, numel in self.buffers:
            if dtype.is_floating_point:  # averaged over the ranks
                for axis in self.batch_axes:
                    total[axis] += 2 * _share(numel * dtype.itemsize, self.sizes[axis])
        return {axis: count for axis, count in total.items() if self.sizes[axis] > 1}

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__


def _share(whole: int, ways: int) -> int:
    return whole * (ways - 1) // ways


def _add_gather(total: dict[str, int], bucket: Bucket, start: int, stop: int, times: int) -> None:
    """Gathering from level ``stop`` to level ``start``, one axis after the other, the last first."""
    for level in range(start, stop):
        axis = bucket.axes[level]
        total[axis] += times * _share(bucket.size(level) * bucket.dtype.itemsize, bucket.sizes[level])


def check_same_tree(plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], what: str) -> None:
    """Raise `TreeError` listing each leaf of ``what`` that is missing, new, or of another shape than the plan's."""
    wanted = dict(zip(plan.leaf_paths, (plan.placements[owner] for owner in plan.owners), strict=True))
    got = dict(zip(paths, shapes, strict=True))
    failures = [f"{path}: missing" for path in wanted if path not in got]
    failures += [f"{path}: not in the plan" for path in got if path not in wanted]
    for path, placement in wanted.items():
        local = plan.local_shape(placement, "param")
        if path in got and got[path] != local:
            failures.append(
                f"{path}: shape {got[path]}, planned {local} (this rank's share of {placement.param.shape})"
            )
    if failures:
        raise TreeError(
            f"the {what} differ from the plan:\n{listing(failures)}\nShard the changed tree anew with sl.shard."
        )

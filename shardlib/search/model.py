"""What is searched for a plan of: the loss block by block, traced once for each way to compute a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardlib.errors import IllegalComposition, ShardlibError
from shardlib.execute.stages.tracing import Tracing, traced_once
from shardlib.mesh.mesh import abstract_mesh
from shardlib.nn.blocks import Sequential
from shardlib.optim.combine import added
from shardlib.plan.buckets import Bucket
from shardlib.plan.build import build_plan
from shardlib.plan.deduplication import TraceCache
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.plan.transform import chain
from shardlib.rng import Key
from shardlib.schedules import make_schedule
from shardlib.search.space import Choice
from shardlib.transforms import pipeline
from shardlib.transforms.experts import RULES
from shardlib.tree import Tree, flatten, leaves_of, matches, tree_map


class BucketCost(NamedTuple):
    """Bytes of a bucket on a rank if nothing is split over the data axis.

    Attributes:
        unit: that its leaves belong to.
        ways: by which other axes divide what is split.
        elements: of the parameters.
        alone: whether one stage holds it, and nothing but the data axis reduces its gradients.
        stored, gradient, states: of the parameters, their gradients, and the optimizer's states.
    """

    name: str
    unit: str
    ways: int
    elements: int
    alone: bool
    stored: int
    gradient: int
    states: float


@dataclass(frozen=True)
class BlockCosts:
    """Costs of the blocks of a loss, in order, computed in one way.

    Attributes:
        held: of each block. A bucket that several blocks share is held in each.
        one, two: traces of each block for one row and for two.
        whole: whether there is only one, the loss, which nothing cuts.
    """

    held: tuple[tuple[BucketCost, ...], ...]
    one: tuple[Trace, ...]
    two: tuple[Trace, ...]
    whole: bool

    def traces(self, rows: int) -> tuple[Trace, ...]:
        """The traces for a number of rows, of which each has its share of the bytes and operations."""
        return tuple(_at(rows, one, two) for one, two in zip(self.one, self.two, strict=True))

    def stage(self, traces: tuple[Trace, ...], start: int, stop: int) -> Trace:
        """About the trace of a stage of some blocks, from theirs: what one block hands to the next is held once."""
        if self.whole:
            return traces[0]
        inner = traces[start:stop]
        kept = sum(trace.kept for trace in inner) - sum(trace.forward for trace in inner[:-1])
        between = sum(trace.between for trace in inner) - sum(trace.forward for trace in inner[:-1])
        live = max(kept + max(trace.live - trace.kept for trace in inner), between)
        if start == 0:  # whose backward is not split, as no stage waits for the gradients of its inputs
            live = kept + max(trace.live - max(trace.kept, trace.between) for trace in inner)
            between = 0
        return Trace(
            None,
            added(trace.activations for trace in inner),
            live,
            live,  # gradients come as activations go
            kept,
            max(0, between),
            inner[-1].forward,
            inner[-1].backward,
            sum(trace.down for trace in inner),
            sum(trace.up for trace in inner),
            sum(trace.host for trace in inner),
            blocks=sum(trace.blocks for trace in inner),
            flops=_both(trace.flops for trace in inner),
            launches=_both(trace.launches for trace in inner),
            streamed=_both(trace.streamed for trace in inner),
            collectives=added(trace.collectives for trace in inner),
        )

    def shared(self, start: int, stop: int) -> list[BucketCost]:
        """What a stage of some blocks holds, each bucket once."""
        return list({bucket.name: bucket for block in self.held[start:stop] for bucket in block}.values())


def _both(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    forward, backward = map(sum, zip(*pairs, strict=True))
    return forward, backward


def _at(rows: int, one: Trace, two: Trace) -> Trace:
    """The trace of one row, with as much more of everything for each further row as the second one has."""

    def line(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping):
            return {axis: line(count, b[axis]) for axis, count in a.items()}
        if isinstance(a, tuple):
            return tuple(map(line, a, b))
        return a + (rows - 1) * (b - a)

    equal = ("touches", "reduced", "live_in", "peak_in", "blocks", "again")
    names = [each.name for each in fields(Trace) if each.name not in equal]
    return replace(one, **{name: line(getattr(one, name), getattr(two, name)) for name in names})


class Model:
    """A loss with its parameters, batch and optimizer, planned by choices.

    Args:
        batch: of all ranks; values are not read.
        rules: of tensor slicing, or None.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Tree,
        batch: Tree,
        optimizer: Any,
        rules: Mapping[str, Any] | None,
    ) -> None:
        self._loss, self._params, self._optimizer, self._rules = loss_fn, params, optimizer, rules
        self._batch = tree_map(_shape, batch)
        self._blocks: dict[Choice, BlockCosts | ShardlibError] = {}
        self._known: dict[int, TraceCache] = {}  # rows of a rank -> the traces of plans
        self.cuts: bool = isinstance(loss_fn, Sequential) and isinstance(params, (list, tuple))
        self.count: int = len(params) if self.cuts else 1

    @property
    def rows(self) -> int:
        """Rows of the batch of all ranks."""
        return min((leaf.shape[0] for leaf in leaves_of(self._batch) if _has_rows(leaf)), default=1)

    @cached_property
    def experts(self) -> int:
        """Experts of a layer, at most."""
        paths, leaves, _ = flatten(self._params)
        return max(
            (leaf.shape[0] for path, leaf in zip(paths, leaves) if matches(path, RULES) and leaf.dim()), default=0
        )

    @cached_property
    def elements(self) -> list[int]:
        """Elements of each block's parameters."""
        blocks = self._params if self.cuts else [self._params]
        return [sum(math.prod(leaf.shape) for leaf in leaves_of(block)) for block in blocks]

    def share(self, rows: int) -> Tree:
        """A rank's batch of so many rows."""
        return tree_map(lambda leaf: leaf[:rows] if _has_rows(leaf) else leaf, self._batch)

    def batch_bytes(self, rows: int) -> int:
        return sum(leaf.nbytes for leaf in leaves_of(self.share(rows)) if isinstance(leaf, torch.Tensor))

    def transform(self, choice: Choice) -> Any:
        return choice.transform(self._rules)

    def rough(self, choice: Choice) -> Plan:
        """The plan of a choice, without traces.

        Raises:
            ShardlibError: the choice makes no plan.
        """
        mesh = abstract_mesh(**choice.mesh)
        return build_plan(self._params, mesh, self.transform(choice), optimizer=self._optimizer)

    def exact(self, choice: Choice) -> Plan:
        """The plan of a choice with its traces.

        Raises:
            ShardlibError: the choice makes no plan.
        """
        return self._traced(self.rough(choice), choice.rows * choice.microbatches)

    def assembled(self, choice: Choice) -> Plan:
        """The plan of a choice with traces that are put together from those of blocks.

        Raises:
            ShardlibError: the choice makes no plan.
        """
        plan, blocks = self.rough(choice), self.blocks(choice)
        traces = blocks.traces(choice.rows)
        spans = plan.stages.spans if plan.stages.axes else ((0, self.count),)
        return replace(plan, traces=tuple(blocks.stage(traces, *span) for span in spans))

    def blocks(self, choice: Choice) -> BlockCosts:
        """The costs of blocks, computed as in a choice.

        Raises:
            ShardlibError: they cannot be computed so.
        """
        way = replace(choice.traced, rows=1)
        if way not in self._blocks:
            try:
                self._blocks[way] = self._computed(way)
            except ShardlibError as error:
                self._blocks[way] = error
        found = self._blocks[way]
        if isinstance(found, ShardlibError):
            raise found.with_traceback(None)  # which would hold all that was there, and grow each time
        return found

    def _computed(self, way: Choice) -> BlockCosts:
        sizes = {"data": 1, **way.mesh}
        parts = [
            self.transform(replace(way, stage=1, sizes=tuple(sizes.items()), schedule=None))
        ]  # whose buckets name their axes
        if self.cuts:
            sizes = {"pipe": self.count, **sizes}
            parts.append(pipeline(way.schedule or "gpipe", 1, partition="count"))
        plan = build_plan(self._params, abstract_mesh(**sizes), chain(*parts), optimizer=self._optimizer)
        one, two = (self._tracing(min(rows, self.rows)).traced(plan).traces for rows in (1, 2))
        if one is None or two is None:
            raise IllegalComposition("a plan is searched for by traces, and this loss reads values")
        held = tuple(
            tuple(_held(bucket, view.needs[0].states["device"] / elements if view.needs and elements else 0.0)
                  for bucket in view.buckets)
            for view in plan.views
            for elements in [sum(bucket.owned for bucket in view.trained)]
        )  # fmt: skip
        return BlockCosts(held, one, two, not self.cuts)

    def _traced(self, plan: Plan, rows: int) -> Plan:
        if rows not in self._known:
            self._known[rows] = traced_once(self._tracing(rows))
        return self._known[rows](plan)

    def _tracing(self, rows: int) -> Tracing:
        return Tracing(self._loss, self.share(rows), None, torch.device("cpu"), None, Key(0))


def paced(plan: Plan, microbatches: int) -> Plan:
    """A plan of several micro-batches with another number of them."""
    schedule = plan.stages.schedule
    stages = replace(plan.stages, schedule=make_schedule(schedule.name, schedule.ranks, microbatches))
    return replace(plan, stages=stages, step=replace(plan.step, microbatches=microbatches))


def _held(bucket: Bucket, states: float) -> BucketCost:
    """What a bucket takes; ``states``: bytes of the optimizer's states for each element that a rank owns."""
    elements = bucket.size(0)
    trained = elements if bucket.trainable else 0
    return BucketCost(
        bucket.name,
        bucket.unit,
        bucket.ways,
        elements,
        not bucket.replicas and len(bucket.stages) == 1,
        elements * bucket.dtype.itemsize,
        trained * bucket.reduce_dtype.itemsize,
        trained * states,
    )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _shape(leaf: Any) -> Any:
    """A leaf's shape without memory."""
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf

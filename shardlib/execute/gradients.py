"""The reduction of gradients, from backward to the optimizer's layout.

Backward hands over each bucket's whole gradient once per micro-batch, as soon as it is complete. When all buckets of a unit
are complete the unit's exchanges start, while backward goes on. The first micro-batch sends units in the order in which they
are complete, as long as that order is the same on all ranks. Later micro-batches keep the order, and a rank that does not
use a parameter sends zeros at that unit's turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.collectives.codecs.base import Residuals
from shardlib.collectives.tree_sum import Node, TreeSum, joined
from shardlib.common._compat import storage_id
from shardlib.errors import HandleError, listing
from shardlib.execute.batches import batch_index
from shardlib.execute.gathering import Gathering
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange, unowned
from shardlib.plan.plan import Plan
from shardlib.sharded.gradient_offload import GradientOffload
from shardlib.sharded.reduction import BoundCodecs, Reduction, Sum

Trees = dict[str, TreeSum[torch.Tensor]]  # bucket name -> the sums of its gradients


@dataclass(frozen=True)
class ReductionOptions:
    """The options of one step's reductions.

    Attributes:
        codecs: the bound codecs of compressed exchanges.
        residuals: residuals of compressed exchanges; written to.
        unreduced: axes over which gradients are not summed, for an optimizer that sums over them itself.
        reached: a set to which the paths of leaves with a gradient are added; None if they are not needed.
        landing: takes each gradient as soon as it is complete, if the optimizer works in another memory.
    """

    codecs: BoundCodecs
    residuals: Residuals
    unreduced: tuple[str, ...] = ()
    reached: set[str] | None = None
    landing: GradientOffload | None = None

    def note(self, paths: Iterable[str]) -> None:
        """Note leaves that have a gradient."""
        if self.reached is not None:
            self.reached.update(paths)


class Turn(NamedTuple):
    """The turn of one micro-batch to add its gradients to a step's sums.

    Attributes:
        microbatch: the micro-batch's index among this rank's.
        last: whether it is the step's last turn.
    """

    microbatch: int
    last: bool


def default_options(mesh: Mesh, landing: GradientOffload | None = None) -> ReductionOptions:
    """The options of reductions over all axes, without residuals of earlier steps."""
    return ReductionOptions(BoundCodecs(mesh), Residuals({}), landing=landing)


class Gradients:
    """The sums of one step's gradients over micro-batches and ranks.

    Attributes:
        started: units whose exchanges the present micro-batch started, in order.
    """

    def __init__(self, plan: Plan, mesh: Mesh, options: ReductionOptions) -> None:
        self._stored, self._plan = plan, plan.tiled
        self._leaf_of = {tile.name: bucket for bucket in plan.buckets for tile in bucket.cut}  # of the state
        self._mesh, self._options = mesh, options
        self._held: dict[str, torch.Tensor] = {}
        self._joined: dict[str, torch.Tensor] = {}  # of leaves in tiles: in a leaf's, its tiles' are views
        self._taken: dict[str, torch.Tensor] = {}  # what has left for the optimizer's memory
        self._trees: Trees | None = {} if plan.step.tree else None
        self._idle: dict[str, Residuals] = {}  # of the exchanges of idle units, by unit
        self._first = batch_index(plan, mesh) * plan.step.microbatches  # the first micro-batch of this rank, among all
        self._flying: deque[tuple[Reduction, int]] = deque()
        self._unfinished: list[Reduction] = []  # those of them that have exchanges left to start
        self._to_free = 0  # elements of the whole gradients that are freed when the reductions under way have ended

    def begin(self, turn: Turn, gathering: Gathering) -> None:
        """Start a micro-batch.

        Args:
            gathering: the micro-batch's gathers, with which the reductions must be ordered.
        """
        (self._microbatch, self._last), self._gathering, self._record = turn, gathering, gathering.record
        self.started: list[str] = []
        self._ready: dict[str, dict[str, torch.Tensor | None]] = {unit: {} for unit in self._plan.trained_in}
        self._complete: set[str] = set()
        self._added: set[str] = set()
        self._late: dict[str, torch.Tensor] = {}
        self._landed: set[str] = set()  # buckets whose reductions have ended
        self._closed = False  # whether backward is over, so that gradients that are not there are zero
        gathering.begin_reductions(self)

    def note(self, paths: Iterable[str], grads: Iterable[torch.Tensor | None]) -> None:
        """Note the leaves that have a gradient (not None)."""
        self._options.note(path for path, grad in zip(paths, grads) if grad is not None)

    def add_leaves(self, bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> bool:
        """Add leaves' gradients to a bucket's sum over micro-batches without packing; False if no whole sum is held yet."""
        held = self._held.get(bucket.name) if bucket.grad_level == 0 else None
        if held is None:
            return False
        bucket.add_leaves(held, grads)
        self._added.add(bucket.name)
        return True

    def added(self, bucket: Bucket) -> bool:
        """Whether `add_leaves` has added gradients of this micro-batch."""
        return bucket.name in self._added

    def add(self, bucket: Bucket, whole: torch.Tensor | None) -> None:
        """Take a bucket's complete gradient of this micro-batch.

        The unit's exchanges start when all of its buckets are complete. Starting each bucket's at once would cost more: on
        gloo a send waits while messages of the same pair of ranks are received.

        Args:
            whole: the whole gradient, rank-major; None if `add_leaves` has added it.
        """
        unit = bucket.unit
        if (
            unit in self._gathering.skipped
        ):  # used outside of the layer that was left out: repeat the step with all exchanges
            self._gathering.strayed = True
        if self._gathering.strayed:
            return
        self._ready[unit][bucket.name] = whole
        if len(self._ready[unit]) < len(self._plan.trained_in[unit]):
            return
        self._complete.add(unit)
        if self._record.order is None:
            self._gathering.agree_to_reduce(unit)
        if self._record.order is None:  # no order was settled, so this unit is next on every rank
            self._start(unit)
        else:
            self.advance()

    def ready(self) -> int:
        """The number of units whose exchanges have started or could start, in the settled order."""
        order, count = self._gathering.order, len(self.started)
        while order is not None and count < len(order) and self._settled(order[count]):
            count += 1
        return count

    def advance(self) -> None:
        """Start the exchanges of units that are ready, up to the limit that `Gathering` sets."""
        limit = self._gathering.limit
        self.skip_to(self.ready() if limit is None else min(limit, self.ready()))

    def skip_to(self, count: int) -> None:
        """Start exchanges until those of ``count`` units have started, with zeros for gradients that are not there."""
        order = self._gathering.order
        while order is not None and len(self.started) < count:
            self._start(order[len(self.started)])

    def _settled(self, unit: str) -> bool:
        return self._closed or unit in self._complete or self._gathering.unused(unit)

    def finish(self, late: dict[str, torch.Tensor]) -> None:
        """End a micro-batch, of which reductions may be under way until `land`. Unused buckets get zero gradients.

        Args:
            late: bucket name -> gradients that arrived at handles, packed. If the bucket's gradient had been complete before,
                they are reduced on their own.
        """
        complete = {name for ready in self._ready.values() for name in ready}
        complete |= {bucket.name for unit in self.started for bucket in self._plan.trained_in[unit]}
        again = {name: late[name] for name in sorted(late) if name in complete}
        self._late = {name: whole for name, whole in late.items() if name not in complete}
        self._closed = True
        self.advance()
        again_on_any_rank = self._gathering.finish(list(again))
        if self._record.order is None:
            self._record.order = [*self.started, *(u for u in self._plan.trained_in if u not in self.started)]
        self.skip_to(len(self._gathering.order or ()))
        if again_on_any_rank or self._gathering.skipped or self._idle:
            self.land()
        if self._last:
            self._leave_out()
        if again_on_any_rank and self._trees is not None:
            raise HandleError(
                f"reproducible(): two gradients of one micro-batch reach\n{listing(list(again_on_any_rank))}\nUse "
                "zero(stage=2), or give a torch.autograd.Function p.clone()"
            )
        for name in again_on_any_rank:
            bucket = self._plan.bucket_of[name]
            each, last = self._routes(bucket)
            whole = again[name] if name in again else self._zeros(bucket)
            for reduced in self._reduction([Sum(bucket, whole)], [(*each, *last) if self._last else each]).wait():
                if landing := self._landing(self._leaf_of[name]):
                    landing.take(self._leaf_of[name], reduced.buffer)
                else:
                    self._held[name].add_(reduced.buffer)
        if self._last:
            for unit, left in self._idle.items():
                self._options.residuals.add(left, self._residuals_of(unit))
            self._idle = {}

    def land(self) -> None:
        """Wait for the reductions of the micro-batch that has ended."""
        while self._flying:
            self._land()

    def _leave_out(self) -> None:
        """Make the gradients of what the step leaves out zero, without an exchange."""
        for bucket in self._stored.trained if self._gathering.skipped else ():
            if any(tile.unit not in self._gathering.skipped for tile in bucket.cut):
                continue
            for tile in bucket.cut:  # a micro-batch before which the ranks had no trace has exchanged zeros
                self._held.pop(tile.name, None)
            if self._trees is not None:
                self._trees.pop(bucket.name, None)
            zeros = torch.zeros(bucket.size(bucket.levels), dtype=bucket.reduce_dtype, device=self._mesh.device)
            if landing := self._landing(bucket):
                self._taken[bucket.name] = landing.take(bucket, zeros)
            else:
                self._buffers(bucket)[bucket.name] = zeros

    @property
    def held(self) -> list[torch.Tensor]:
        """The buffers that are kept from one micro-batch to the next."""
        sums = [total for tree in (self._trees or {}).values() for total in tree.sums]
        return [*self._held.values(), *sums]

    def result(self) -> dict[str, torch.Tensor]:
        """Bucket name -> this rank's shard of the gradient, after the last micro-batch."""
        self.land()
        return {
            bucket.name: self._taken[bucket.name] if bucket.name in self._taken else self._buffers(bucket)[bucket.name]
            for bucket in self._stored.trained
        }

    def _buffers(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The buffers among which a bucket of the state has its gradient: `_held`, or for a leaf in tiles `_joined`."""
        return self._held if bucket.tiles == 1 else self._joined

    def _hold(self, bucket: Bucket, grad: torch.Tensor) -> None:
        """Keep a gradient; that of a tile where the leaf's other tiles are, so that the leaf's is never there twice."""
        leaf = self._leaf_of[bucket.name]
        if leaf.tiles > 1:
            size = leaf.tiles * grad.numel()
            # Sums that are whole over micro-batches are shards in the end.
            if leaf.name not in self._joined or self._joined[leaf.name].numel() != size:
                self._joined[leaf.name] = grad.new_empty(size)
            part = leaf.of_tiles(self._joined[leaf.name])[leaf.cut.index(bucket)]
            there = storage_id(part.untyped_storage()) == storage_id(grad.untyped_storage())
            grad = part if there else part.copy_(grad)
        self._held[bucket.name] = grad

    def _zeros(self, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(bucket.size(0), dtype=bucket.reduce_dtype, device=self._mesh.device)

    def _start(self, unit: str) -> None:
        self.started.append(unit)
        ready = self._ready[unit]
        for bucket in self._plan.trained_in[unit]:
            if bucket.name not in ready:
                whole = self._late.pop(bucket.name, None)
                ready[bucket.name] = self._zeros(bucket) if whole is None else whole
        groups: dict[tuple[Any, ...], list[Bucket]] = {}
        for bucket in self._plan.trained_in[unit]:
            each, last = self._routes(bucket)
            lands = self._stored.lands_each(self._leaf_of[bucket.name])
            collectives = lands, len(each), *((exchange.op, exchange.axis) for exchange in (*each, *last))
            groups.setdefault(collectives, []).append(bucket)
        for buckets in groups.values():
            self._reduce(buckets, [ready.pop(bucket.name) for bucket in buckets])

    def _routes(self, bucket: Bucket) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
        """A bucket's exchanges after each micro-batch, and after the last one."""
        routes = self._plan.routes[bucket.name]
        return routes.each, unowned(routes.last, self._options.unreduced)

    def _reduce(self, buckets: list[Bucket], wholes: list[torch.Tensor | None]) -> None:
        """Start the exchanges of buckets whose routes have the same collectives."""
        each, last = (list(routes) for routes in zip(*map(self._routes, buckets), strict=True))
        leaf = self._leaf_of[buckets[0].name]
        if not each[0] and self._stored.lands_each(leaf) and self._landing(leaf):
            self._fly(
                [Sum(b, whole, whole) for b, whole in zip(buckets, wholes, strict=True) if whole is not None], each
            )
            return
        if not each[0]:
            sums = [self._sum(bucket, whole) for bucket, whole in zip(buckets, wholes, strict=True)]
            if self._last:
                self._fly(sums, last)
            return
        sums = [Sum(bucket, whole) for bucket, whole in zip(buckets, wholes, strict=True) if whole is not None]
        if not self._last or not last[0]:
            self._fly(sums, each)
        elif buckets[0].name not in self._held:
            self._fly(sums, [(*early, *late) for early, late in zip(each, last)])
        else:
            for reduced in self._reduction(sums, each).wait():
                reduced.buffer.add_(self._held.pop(reduced.bucket.name))
            self._fly(sums, last)

    def _sum(self, bucket: Bucket, whole: torch.Tensor | None) -> Sum:
        """The sum over micro-batches of a gradient that is kept whole until the last one."""
        if self._trees is not None:
            return self._tree_sum(self._trees, bucket, whole)
        held = self._held.pop(bucket.name, None)
        if held is not None:
            whole = held if whole is None else held.add_(whole)
        assert whole is not None
        if held is None and bucket.alone and not (self._last and bucket.levels):
            whole = whole.clone()  # the gradient of a single leaf was not packed, so it may be a tensor of the user's
        if not self._last:
            self._hold(bucket, whole)
            return Sum(bucket, whole)
        if held is not None or not bucket.levels:
            return Sum(bucket, whole, whole)
        compressed = self._plan.routes[bucket.name].last[0].channel is not None
        if compressed or self._landing(self._leaf_of[bucket.name]):
            # What is decoded has memory of its own, and what goes to another memory would hold the whole buffer until then.
            return Sum(bucket, whole)
        # The plan counts a whole gradient in this role, so the result may stay in a buffer of that size.
        return Sum(bucket, whole, torch.empty_like(whole))

    def _tree_sum(self, trees: Trees, bucket: Bucket, whole: torch.Tensor | None) -> Sum:
        assert whole is not None and self._plan.step.total_microbatches is not None
        tree = trees.setdefault(bucket.name, TreeSum(self._plan.step.total_microbatches))
        # The tree adds in place, and a gradient that was not packed may be a tensor of the user's.
        tree.add(Node(0, self._first + self._microbatch), whole.clone() if bucket.alone else whole)
        if not self._last:
            return Sum(bucket, whole)
        sums, count = trees.pop(bucket.name).sums, self._plan.step.nodes
        return Sum(bucket, sums[0] if count == 1 else joined(sums, count))

    def _fly(self, sums: list[Sum], routes: Sequence[Sequence[Exchange]]) -> None:
        freed = sum(each.buffer.numel() for each in sums if each.within is not each.buffer)
        reduction = self._reduction(sums, routes)
        self._flying.append((reduction, freed))
        self._to_free += freed
        # A sum over a second axis runs under the backward of the units that follow, with their sums over the first one.
        for earlier in self._unfinished:
            earlier.go_on()
        self._unfinished = [each for each in (*self._unfinished, reduction) if each.more]
        # Whole gradients that are freed after their exchange must not pile up behind a slow network. Those of tiles must not
        # be there beside the next tile's.
        tiles = any(self._leaf_of[each.bucket.name].tiles > 1 for each in sums)
        while self._flying and (tiles or self._to_free > self._plan.most_in_flight):
            self._land()
        if any(self._landing(self._leaf_of[each.bucket.name]) for each in sums):
            while self._flying and (len(self._flying) > 1 or self._flying[0][0].complete):
                self._land()

    def _reduction(self, sums: list[Sum], routes: Sequence[Sequence[Exchange]]) -> Reduction:
        residuals, unit = self._options.residuals, sums[0].bucket.unit if sums else ""
        if unit in self._gathering.idle:  # its residuals stay, as in a step that makes no such exchange
            if unit not in self._idle:
                self._idle[unit] = residuals.empty(self._residuals_of(unit))
            residuals = self._idle[unit]
        return Reduction(self._mesh, sums, routes, self._options.codecs, residuals)

    def _residuals_of(self, unit: str) -> list[str]:
        """The names of the residuals that the exchanges of a unit keep."""
        channels = [channel for channel in self._plan.channels if channel.bucket.unit == unit]
        return [name for channel in channels for name, kept in channel.keeps.items() if kept.residual]

    def _land(self) -> None:
        reduction, freed = self._flying.popleft()
        self._to_free -= freed
        for reduced in reduction.wait():
            held = self._held.get(reduced.bucket.name)
            self._hold(reduced.bucket, reduced.buffer if held is None else held.add_(reduced.buffer))
            self._landed.add(reduced.bucket.name)
            leaf = self._leaf_of[reduced.bucket.name]
            if (landing := self._landing(leaf)) and self._landed.issuperset(tile.name for tile in leaf.cut):
                whole = self._buffers(leaf).pop(leaf.name)
                for tile in leaf.cut:
                    self._held.pop(tile.name, None)
                self._taken[leaf.name] = landing.take(leaf, whole)

    def _landing(self, bucket: Bucket) -> GradientOffload | None:
        """What takes the bucket's gradient now: when its sum is complete, or after each micro-batch if gradients are
        accumulated there. None if it stays, or if other stages add to it."""
        landing = self._options.landing
        now = self._last or self._stored.lands_each(bucket)
        return landing if now and landing and landing.takes(bucket) and len(bucket.stages) == 1 else None

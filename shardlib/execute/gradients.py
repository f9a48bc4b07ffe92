"""Gradients on their way from backward to the optimizer's layout.

Each bucket's gradient arrives whole, once per micro-batch, as soon as it is complete, and when all of a unit's have
come their exchanges start, while backward goes on. The first micro-batch sends units as they come, as long as the ranks
are alike; that order then holds: a rank whose branch leaves a parameter unused sends zeros in its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.collectives.codecs.base import Errors
from shardlib.execute.gathering import Gathering
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange, unowned
from shardlib.plan.plan import Plan
from shardlib.sharded.reduction import Lines, Reduction, Sum


@dataclass(frozen=True)
class Route:
    """What a step's gradients meet on their way.

    Attributes:
        lines: how values travel in few bits, and
        residuals: what that leaves out; written to.
        unreduced: axes over which they are left unsummed, for an optimizer that does it itself.
        reached: takes the paths of leaves that a gradient reached; None where nobody asks.
    """

    lines: Lines
    residuals: Errors
    unreduced: tuple[str, ...] = ()
    reached: set[str] | None = None


def plain_route(mesh: Mesh) -> Route:
    """Gradients are summed over all axes, and nothing is left out of earlier ones."""
    return Route(Lines(mesh), Errors({}))


class Gradients:
    """Sums gradients over micro-batches and ranks.

    Args:
        route: see `Route`.

    Attributes:
        started: units whose exchanges this micro-batch started, in order.
    """

    def __init__(self, plan: Plan, mesh: Mesh, route: Route) -> None:
        self._plan, self._mesh, self._route = plan, mesh, route
        self._held: dict[str, torch.Tensor] = {}

    def begin(self, last: bool, gathering: Gathering) -> None:
        """Start a micro-batch, whose gathers these reductions stand between; ``last`` when it is the step's last."""
        self._last, self._gathering, self._record = last, gathering, gathering.record
        self.started: list[str] = []
        self._ready: dict[str, dict[str, torch.Tensor | None]] = {unit: {} for unit in self._plan.trained_in}
        self._complete: set[str] = set()
        self._added: set[str] = set()
        self._late: dict[str, torch.Tensor] = {}
        self._closed = False  # whether backward is over: what has not come by now has the gradient zero
        self._flying: list[tuple[Reduction, int]] = []
        gathering.begin_reductions(self)

    def note(self, paths: Iterable[str], grads: Iterable[torch.Tensor | None]) -> None:
        """Gradients of leaves come, None where there is none."""
        if self._route.reached is not None:
            self._route.reached.update(path for path, grad in zip(paths, grads) if grad is not None)

    def add_leaves(self, bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> bool:
        """Add leaves' gradients to the bucket's sum over micro-batches, if one is kept whole; packing is then saved."""
        held = self._held.get(bucket.name) if bucket.grad_level == 0 else None
        if held is None:
            return False
        bucket.add_leaves(held, grads)
        self._added.add(bucket.name)
        return True

    def added(self, bucket: Bucket) -> bool:
        """Whether `add_leaves` took gradients of this micro-batch."""
        return bucket.name in self._added

    def add(self, bucket: Bucket, whole: torch.Tensor | None) -> None:
        """A bucket's complete gradient of this micro-batch: whole, rank-major; None where `add_leaves` took it.

        A unit starts when all of its have come. Starting each as it comes would cost more: on gloo a send waits while
        others of its pair are received.
        """
        unit = bucket.unit
        if self._gathering.strayed:
            return
        self._ready[unit][bucket.name] = whole
        if len(self._ready[unit]) < len(self._plan.trained_in[unit]):
            return
        self._complete.add(unit)
        if self._record.order is None:
            self._gathering.agree_to_reduce(unit)
        if self._record.order is None:  # still: this unit is next on every rank
            self._start(unit)
        else:
            self.advance()

    def ready(self) -> int:
        """How many units have started or could, in their order."""
        order, count = self._record.order, len(self.started)
        while order is not None and count < len(order) and self._settled(order[count]):
            count += 1
        return count

    def advance(self) -> None:
        """Start the units that can and may."""
        limit = self._gathering.limit
        self.skip_to(self.ready() if limit is None else min(limit, self.ready()))

    def skip_to(self, count: int) -> None:
        """Start units until this many have, with zeros for what has not come."""
        while self._record.order is not None and len(self.started) < count:
            self._start(self._record.order[len(self.started)])

    def _settled(self, unit: str) -> bool:
        return self._closed or unit in self._complete or self._gathering.unused(unit)

    def finish(self, late: dict[str, torch.Tensor]) -> None:
        """End a micro-batch: zeros for what was not used, and what reached handles themselves (``late``)."""
        come = {name for ready in self._ready.values() for name in ready}
        come |= {bucket.name for unit in self.started for bucket in self._plan.trained_in[unit]}
        again = {name: late[name] for name in sorted(late) if name in come}
        self._late = {name: whole for name, whole in late.items() if name not in come}
        self._closed = True
        self.advance()
        everyones = self._gathering.finish(list(again))
        if self._record.order is None:
            self._record.order = [*self.started, *(u for u in self._plan.trained_in if u not in self.started)]
        self.skip_to(len(self._record.order))
        while self._flying:
            self._land()
        for name in everyones:
            bucket = self._plan.bucket_of[name]
            each, last = self._routes(bucket)
            whole = again[name] if name in again else self._zeros(bucket)
            for part in self._reduction([Sum(bucket, whole)], [(*each, *last) if self._last else each]).wait():
                self._held[name].add_(part.buffer)

    @property
    def held(self) -> list[torch.Tensor]:
        """What is kept from one micro-batch to the next."""
        return list(self._held.values())

    def result(self) -> dict[str, torch.Tensor]:
        """Bucket name -> this rank's shard of the gradient, after the last micro-batch."""
        return {bucket.name: self._held[bucket.name] for bucket in self._plan.trained}

    def _zeros(self, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(bucket.size(0), dtype=bucket.reduce_dtype, device=self._mesh.device)

    def _start(self, unit: str) -> None:
        self.started.append(unit)
        ready = self._ready[unit]
        for bucket in self._plan.trained_in[unit]:
            if bucket.name not in ready:
                whole = self._late.pop(bucket.name, None)
                ready[bucket.name] = self._zeros(bucket) if whole is None else whole
        together: dict[tuple[Any, ...], list[Bucket]] = {}
        for bucket in self._plan.trained_in[unit]:
            each, last = self._routes(bucket)
            alike = len(each), *((exchange.op, exchange.axis) for exchange in (*each, *last))
            together.setdefault(alike, []).append(bucket)
        for buckets in together.values():
            self._reduce(buckets, [ready.pop(bucket.name) for bucket in buckets])

    def _routes(self, bucket: Bucket) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
        """What is sent after each micro-batch, and after the last."""
        routes = self._plan.routes[bucket.name]
        return routes.each, unowned(routes.last, self._route.unreduced)

    def _reduce(self, buckets: list[Bucket], wholes: list[torch.Tensor | None]) -> None:
        """Start the exchanges of buckets with the same route."""
        each, last = (list(routes) for routes in zip(*map(self._routes, buckets), strict=True))
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
            for part in self._reduction(sums, each).wait():
                part.buffer.add_(self._held.pop(part.bucket.name))
            self._fly(sums, last)

    def _sum(self, bucket: Bucket, whole: torch.Tensor | None) -> Sum:
        """A gradient that is kept whole until the last micro-batch."""
        held = self._held.pop(bucket.name, None)
        if held is not None:
            whole = held if whole is None else held.add_(whole)
        assert whole is not None
        if held is None and bucket.alone and not (self._last and bucket.levels):
            whole = whole.clone()  # it may be somebody's tensor: never packed, and now to be written to
        if not self._last:
            self._held[bucket.name] = whole
            return Sum(bucket, whole)
        if held is not None or not bucket.levels:
            return Sum(bucket, whole, whole)
        if self._plan.routes[bucket.name].last[0].channel is not None:
            return Sum(bucket, whole)  # it is decoded elsewhere
        # What the sum is written into is as large as what was planned for: the whole gradient.
        return Sum(bucket, whole, torch.empty_like(whole))

    def _fly(self, sums: list[Sum], routes: Sequence[Sequence[Exchange]]) -> None:
        freed = sum(part.bucket.size(0) for part in sums if part.within is not part.buffer)
        self._flying.append((self._reduction(sums, routes), freed))
        # Whole gradients that are not what is kept must not pile up behind a slow network.
        while sum(freed for _, freed in self._flying) > 2 * self._plan.largest_unit:
            self._land()

    def _reduction(self, sums: list[Sum], routes: Sequence[Sequence[Exchange]]) -> Reduction:
        return Reduction(self._mesh, sums, routes, self._route.lines, self._route.residuals)

    def _land(self) -> None:
        reduction, _ = self._flying.pop(0)
        for part in reduction.wait():
            held = self._held.get(part.bucket.name)
            self._held[part.bucket.name] = part.buffer if held is None else held.add_(part.buffer)

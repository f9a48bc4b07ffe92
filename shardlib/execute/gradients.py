"""Gradients on their way from backward to the optimizer's layout.

Each bucket's gradient arrives whole, once per micro-batch, as soon as it is complete, and its exchange starts at
once while backward goes on. The first micro-batch sends buckets as they come; that order, checked to be the same
on all ranks, then holds: a rank whose branch leaves a parameter unused sends zeros in its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.exchange import LeafReduction, Reduction
from shardlib.layout import Bucket
from shardlib.mesh import Mesh
from shardlib.plan import Plan

Whole = torch.Tensor | Sequence[torch.Tensor | None]

_IN_FLIGHT = 2  # exchanges under way before the oldest is waited for, where whole gradients may be dropped


class Gradients:
    """Sums gradients over micro-batches and ranks.

    Args:
        order: names of buckets in the order their exchanges are to start; None to take them as they come.
    """

    def __init__(self, plan: Plan, mesh: Mesh, order: list[str] | None) -> None:
        self._plan, self._mesh, self._order = plan, mesh, order
        self._held: dict[str, torch.Tensor] = {}
        self._begin()
        self.started: list[str] = []

    def _begin(self) -> None:
        self._ready: dict[str, Whole] = {}
        self._flying: list[tuple[Bucket, Reduction | LeafReduction, bool]] = []
        self._turn = 0
        self._seen: set[str] = set()

    def begin(self, last: bool) -> None:
        """Start a micro-batch; ``last`` when it is the step's last."""
        self._last = last
        self.started = []
        self._begin()

    def add(self, bucket: Bucket, whole: Whole) -> None:
        """A bucket's complete gradient of this micro-batch: packed (whole, rank-major), or leaf by leaf."""
        self._seen.add(bucket.name)
        if self._order is None:
            self._start(bucket, whole)
            return
        self._ready[bucket.name] = whole
        while self._turn < len(self._order) and self._order[self._turn] in self._ready:
            name = self._order[self._turn]
            self._turn += 1
            self._start(self._plan.bucket_of[name], self._ready.pop(name))

    def finish(self, late: dict[str, torch.Tensor]) -> None:
        """End a micro-batch: zeros for what was not used, and what reached handles themselves (``late``)."""
        names = self._order or [bucket.name for bucket in self._plan.trained]
        for name in names:
            if name not in self._seen:
                bucket = self._plan.bucket_of[name]
                whole = late.pop(name, None)
                self.add(bucket, self._zeros(bucket) if whole is None else whole)
        while self._flying:
            self._land()
        for name, whole in sorted(late.items()):
            bucket = self._plan.bucket_of[name]
            stop = bucket.levels if self._last else bucket.grad_level
            part = Reduction(self._mesh, bucket, whole, 0, stop, replicas=self._last, in_place=False).wait()
            self._held[name].add_(part)

    def result(self) -> dict[str, torch.Tensor]:
        """Bucket name -> this rank's shard of the gradient, after the last micro-batch."""
        return {bucket.name: self._held[bucket.name] for bucket in self._plan.trained}

    def _zeros(self, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(bucket.size(0), dtype=bucket.reduce_dtype, device=self._mesh.device)

    def takes_leaves(self, bucket: Bucket) -> bool:
        """Whether `add` takes this bucket's gradient leaf by leaf: it is reduced at once, over one axis, and gains by it."""
        waits = self._last and bool(bucket.replicas) and bucket.name in self._held
        return bucket.grad_level == bucket.levels == 1 and bool(bucket.large) and not waits

    def _start(self, bucket: Bucket, whole: Whole) -> None:
        self.started.append(bucket.name)
        level = bucket.grad_level
        if self.takes_leaves(bucket):
            # However it arrived: what is exchanged must be the same on a rank that used the bucket otherwise, or not.
            leaves = bucket.unpack(whole) if isinstance(whole, torch.Tensor) else whole
            self._track(bucket, LeafReduction(self._mesh, bucket, leaves, replicas=self._last))
            return
        assert isinstance(whole, torch.Tensor)
        if level == 0:
            held = self._held.pop(bucket.name, None)
            total = whole if held is None else held.add_(whole)
            if self._last:
                self._fly(bucket, total, 0, bucket.levels, True)
            else:
                self._held[bucket.name] = total
        elif not self._last or (level == bucket.levels and not bucket.replicas):
            self._fly(bucket, whole, 0, level, False)
        elif bucket.name not in self._held:
            self._fly(bucket, whole, 0, bucket.levels, True)
        else:
            part = Reduction(self._mesh, bucket, whole, 0, level, replicas=False, in_place=False).wait()
            self._fly(bucket, part.add_(self._held.pop(bucket.name)), level, bucket.levels, True)

    def _fly(self, bucket: Bucket, buffer: torch.Tensor, start: int, stop: int, replicas: bool) -> None:
        whole = bucket.grad_level == 0
        self._track(bucket, Reduction(self._mesh, bucket, buffer, start, stop, replicas=replicas, in_place=whole))

    def _track(self, bucket: Bucket, reduction: Reduction | LeafReduction) -> None:
        self._flying.append((bucket, reduction, bucket.grad_level == 0))
        # Where gradients are split, whole ones must not pile up behind a slow network.
        while sum(1 for _, _, kept in self._flying if not kept) > _IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        bucket, reduction, _ = self._flying.pop(0)
        part = reduction.wait()
        held = self._held.get(bucket.name)
        self._held[bucket.name] = part if held is None else held.add_(part)

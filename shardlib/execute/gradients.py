"""Gradients on their way from backward to the optimizer's layout.

Each bucket's gradient arrives whole, once per micro-batch, as soon as it is complete, and when all of a unit's have
come their exchanges start, while backward goes on. The first micro-batch sends units as they come; that order, checked
to be the same on all ranks, then holds: a rank whose branch leaves a parameter unused sends zeros in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardlib.exchange import Reduction
from shardlib.layout import Bucket
from shardlib.mesh import Mesh
from shardlib.plan import Plan


class Gradients:
    """Sums gradients over micro-batches and ranks.

    Args:
        order: units in the order their exchanges are to start; None to take them as they come.
        announce: called before a unit's exchanges start.

    Attributes:
        started: units whose exchanges this micro-batch started, in order.
    """

    def __init__(
        self, plan: Plan, mesh: Mesh, order: list[str] | None, announce: Callable[[str], None] = lambda unit: None
    ) -> None:
        self._plan, self._mesh, self._order, self._announce = plan, mesh, order, announce
        self._held: dict[str, torch.Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        self.started: list[str] = []
        self._ready: dict[str, dict[str, torch.Tensor | None]] = {unit: {} for unit in self._plan.trained_in}
        self._complete: set[str] = set()
        self._added: set[str] = set()
        self._flying: list[tuple[Bucket, Reduction, bool]] = []

    def begin(self, last: bool) -> None:
        """Start a micro-batch; ``last`` when it is the step's last."""
        self._last = last
        self._begin()

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
        self._ready[unit][bucket.name] = whole
        if len(self._ready[unit]) < len(self._plan.trained_in[unit]):
            return
        self._complete.add(unit)
        if self._order is None:
            self._start(unit)
            return
        while len(self.started) < len(self._order) and self._order[len(self.started)] in self._complete:
            self._start(self._order[len(self.started)])

    def finish(self, late: dict[str, torch.Tensor]) -> None:
        """End a micro-batch: zeros for what was not used, and what reached handles themselves (``late``)."""
        for unit in self._order or self._plan.trained_in:
            for bucket in self._plan.trained_in[unit]:
                if unit not in self._complete and bucket.name not in self._ready[unit]:
                    whole = late.pop(bucket.name, None)
                    self.add(bucket, self._zeros(bucket) if whole is None else whole)
        while self._flying:
            self._land()
        for name, whole in sorted(late.items()):
            bucket = self._plan.bucket_of[name]
            stop = bucket.levels if self._last else bucket.grad_level
            part = Reduction(self._mesh, bucket, whole, 0, stop, replicas=self._last).wait()
            self._held[name].add_(part)

    def result(self) -> dict[str, torch.Tensor]:
        """Bucket name -> this rank's shard of the gradient, after the last micro-batch."""
        return {bucket.name: self._held[bucket.name] for bucket in self._plan.trained}

    def _zeros(self, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(bucket.size(0), dtype=bucket.reduce_dtype, device=self._mesh.device)

    def _start(self, unit: str) -> None:
        self._announce(unit)
        self.started.append(unit)
        ready = self._ready[unit]
        for bucket in self._plan.trained_in[unit]:
            self._reduce(bucket, ready.pop(bucket.name))

    def _reduce(self, bucket: Bucket, whole: torch.Tensor | None) -> None:
        level = bucket.grad_level
        if level == 0:
            self._keep(bucket, whole)
            return
        assert whole is not None
        if not self._last or (level == bucket.levels and not bucket.replicas):
            self._fly(bucket, whole, 0, level, False)
        elif bucket.name not in self._held:
            self._fly(bucket, whole, 0, bucket.levels, True)
        else:
            part = Reduction(self._mesh, bucket, whole, 0, level, replicas=False).wait()
            self._fly(bucket, part.add_(self._held.pop(bucket.name)), level, bucket.levels, True)

    def _keep(self, bucket: Bucket, whole: torch.Tensor | None) -> None:
        """A gradient that is kept whole until the last micro-batch."""
        held = self._held.pop(bucket.name, None)
        if held is not None:
            whole = held if whole is None else held.add_(whole)
        assert whole is not None
        if held is None and bucket.alone and not (self._last and bucket.levels):
            whole = whole.clone()  # it may be somebody's tensor: never packed, and now to be written to
        if not self._last:
            self._held[bucket.name] = whole
        else:
            # What the sum is written into is as large as what was planned for: the whole gradient.
            within = torch.empty_like(whole) if held is None and bucket.levels else whole
            self._fly(bucket, whole, 0, bucket.levels, True, within)

    def _fly(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        start: int,
        stop: int,
        replicas: bool,
        within: torch.Tensor | None = None,
    ) -> None:
        reduction = Reduction(self._mesh, bucket, buffer, start, stop, replicas=replicas, within=within)
        self._flying.append((bucket, reduction, within is not buffer))
        # Whole gradients that are not what is kept must not pile up behind a slow network.
        while sum(bucket.size(0) for bucket, _, freed in self._flying if freed) > 2 * self._plan.largest_unit:
            self._land()

    def _land(self) -> None:
        bucket, reduction, _ = self._flying.pop(0)
        part = reduction.wait()
        held = self._held.get(bucket.name)
        self._held[bucket.name] = part if held is None else held.add_(part)

"""What runs of one function showed so far, and whether the ranks' runs were alike.

Exchanges are paired by their order alone. So the ranks announce each exchange in the first run; later runs that do as
the one before cost nothing, and of one that does not the others are told once the step is over, before its numbers
are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.mesh import Mesh
from shardlib.optim.shards import sum_over
from shardlib.plan import Plan


class Record:
    """Shared by the executors that run the same function.

    Attributes:
        trace: the units that the last run touched, in order; None before the first.
        order: units in the order their reductions start; None before the first backward.
        strays: of the present step, the runs that were not as the one before them.
        done: the steps of `shardlib.execute.sequence` that the function took.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self.trace: list[str | None] | None = None
        self.order: list[str] | None = None
        self.strays: list[list[str | None]] = []
        self.done: set[str] = set()

    def announce(self, verb: str, unit: str) -> None:
        """In the first run, ranks tell each other which exchange is next: else they would mix two."""
        if self.trace is None:
            buckets = [bucket for bucket in self._plan.buckets if bucket.unit == unit]
            used = {axis for bucket in buckets for axis in (*bucket.axes, *bucket.replicas)}
            self._require_equal({"next": f"{verb} unit {unit!r}"}, [axis for axis in self._mesh.shape if axis in used])

    def note(self, runs: Sequence[str | None], started: Sequence[str] | None = None) -> None:
        """A run is over: what it touched and, after a backward, the order of its reductions."""
        if self.trace is None:
            items = {"units gathered, in order": list(runs), "gradients reduced, in order": started}
            self._require_equal(items, self._plan.alike)
            self.order = None if started is None else list(started)
        elif self.trace != runs:
            self.strays.append(list(runs))
        self.trace = list(runs)

    def meet(self) -> None:
        """Tell the other ranks whether this one strayed, and compare where one did. Raises as `reconcile`."""
        strayed = torch.tensor([float(bool(self.strays))], device=self._mesh.device)
        sum_over(self._mesh, self._plan.alike, strayed)
        if strayed.item():
            self.reconcile()

    def reconcile(self) -> None:
        """Hold the ranks' strays together. Every rank calls it, when any of them strayed.

        Raises:
            RankMismatch: they differ, so that gathers of different units were mixed; names what each gathered.
        """
        strays, self.strays = self.strays, []
        self._require_equal({"units gathered": strays or [self.trace]}, self._plan.alike)

    def _require_equal(self, items: dict[str, Any], axes: Sequence[str]) -> None:
        primitives.require_equal(self._mesh, "steps", items, SAME_ORDER, axes)


SAME_ORDER = (
    "Every rank must use the same parameters in the same order: always where they are gathered (ZeRO stage 3), elsewhere in "
    "the first step. Where ranks differ in what they use, take zero(stage=2)."
)

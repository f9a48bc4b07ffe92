"""Checks, in every step, that ranks which must be given the same inputs are given the same.

In the first step the ranks compare digests before anything runs. In later steps each rank adds an integer to a sum that the
step makes anyway. Of n ranks that must agree, the first adds n−1 times its digest and each other subtracts its own, so that
the sum is zero if all agree. If digests differ the sum is zero with a probability below 2^-35 (for 4,096 ranks). If the sum
is not zero, the ranks make another exchange to find what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shardlib.collectives import primitives
from shardlib.errors import RankMismatch, axes_named
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.sharded.checksum import checksums
from shardlib.tree import Tree

EVERY = 16  # steps between two comparisons of batches' contents: reading them costs a pass over their memory


class Inputs:
    """Compares the inputs of the ranks of one plan.

    Batches must be equal along the axes over which the batch does not vary: dtypes and shapes are compared in every step,
    contents in the first and in every 16th. Other inputs must be equal on all ranks and are compared in every step.

    Args:
        together: axes along which ranks take every step together, among them all axes over which the batch does not vary; by
            default all axes.

    Attributes:
        axes: the axes along which batches must be equal.
    """

    def __init__(self, plan: Plan, mesh: Mesh, together: tuple[str, ...] | None = None) -> None:
        self._plan, self._mesh = plan, mesh
        self._together = tuple(mesh.shape) if together is None else together
        self.axes = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in plan.batch_axes]
        self._calls = 0
        self._batch: dict[str, str] = {}
        self._equal: dict[str, str] = {}

    def share(self, batch: Tree, equal: Mapping[str, Any]) -> float:
        """This rank's number, an integer. If the sum over ranks, in float64, is not zero, all of them must call `explain`.

        Args:
            equal: name -> value that must be equal on all ranks; compared as text. If empty, the sum may be over only the
                ranks that take steps together.

        Raises:
            RankMismatch: in the first call, as `explain`.
        """
        if self._mesh.alone:
            return 0.0
        self._equal = {name: str(value) for name, value in equal.items()}
        if self.axes:
            sums = checksums(batch, self._calls % EVERY == 0)
            self._batch = {path or "batch": checksum for path, checksum in sums.items()}
        self._calls += 1
        if self._calls == 1:
            self.explain()
        mesh, ranks = self._mesh, self._mesh.size
        index, sharing, group = 0, 1, []
        for axis, size in mesh.shape.items():
            if axis in self.axes:
                index, sharing = index * size + mesh.coords[axis], sharing * size
            else:
                group.append(mesh.coords[axis])
        # The digest covers the group's coordinates; without them opposite differences in two groups would cancel.
        number = self._number((group, self._batch)) * (sharing * (index == 0) - 1)
        if equal:
            number += self._number(self._equal) * (ranks * (mesh.rank == 0) - 1)
        return float(number)

    def explain(self) -> None:
        """Compare the inputs of the last call of `share`. Collective: all ranks that take steps together call it.

        Raises:
            RankMismatch: on all ranks, where any differ; names the leaves and the ranks.
        """
        mesh, batch_axes = self._mesh, self._plan.batch_axes
        remedy = (
            "Step all ranks from one state: made with the same arguments, restored from the same checkpoint, and with "
        )
        remedy += "the same hyper-parameters written to it."
        if self._equal:
            primitives.require_equal(mesh, "steps", self._equal, remedy, self._together)
        if not self.axes:
            return
        differences = primitives.differences(mesh, self._batch, self.axes)
        of_ranks = primitives.all_gather_object(mesh, self._together, differences)
        problems = list(dict.fromkeys(problem for of_rank in of_ranks for problem in of_rank))
        if problems:
            chosen = " and ".join(f"mesh.coords[{axis!r}]" for axis in batch_axes)
            remedy = f"choose it by {chosen} alone" if chosen else "pass all ranks the same"
            remedy = f"Ranks along {axes_named(self.axes)} work on one batch: {remedy}."
            raise RankMismatch(primitives.mismatch("batches", problems, remedy))

    def _number(self, value: Any) -> int:
        """A digest as an integer with so few bits that sums over all ranks stay below 2^53, where float64 is exact."""
        digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - (50 - self._mesh.size.bit_length()))


def taken_together(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks take each batch together: they share the batch, gather parameters from each other, or send
    each other tokens for experts."""
    waiting = {axis for bucket in plan.everywhere.buckets for axis in bucket.axes[: bucket.param_level]}
    if plan.step.tokens is not None:
        waiting.update(plan.step.tokens.axes)
    return tuple(
        axis for axis, size in plan.sizes.items() if size > 1 and (axis in waiting or axis not in plan.batch_axes)
    )

"""Whether ranks that must be given the same are given the same, step after step.

In the first step they tell each other before anything runs. After that each puts a number into a sum that the step makes
anyway. The numbers are made so that they add up to zero exactly where the ranks agree: of ranks that must agree, one puts
in its digest, as an integer, as often as there are others, and each of these takes its own away. Where digests differ the
sum is zero with a probability below 2^-35 (for 4,096 ranks), and what differs is looked up by another exchange.
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
    """The ranks of one plan, and what they were given last.

    Batches must be equal along the axes that do not share the batch out; their dtypes and shapes are compared in every
    step, their contents in the first and in every 16th. Whatever else is given must be equal on all ranks in every step.

    Args:
        together: axes along which ranks take every step together, those that do not share the batch out among them; by
            default all.

    Attributes:
        axes: those along which batches must be equal.
    """

    def __init__(self, plan: Plan, mesh: Mesh, together: tuple[str, ...] | None = None) -> None:
        self._plan, self._mesh = plan, mesh
        self._together = tuple(mesh.shape) if together is None else together
        self.axes = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in plan.batch_axes]
        self._calls = 0
        self._batch: dict[str, str] = {}
        self._alike: dict[str, str] = {}

    def share(self, batch: Tree, alike: Mapping[str, Any]) -> float:
        """This rank's number, an integer. Summed in float64 it is zero, or `explain` is due on all ranks that take part.

        Args:
            alike: what must be equal on all ranks, by name; compared as text. Without any, the sum may be over the ranks
                that take steps together alone.

        Raises:
            RankMismatch: in the first call, as `explain`.
        """
        if self._mesh.alone:
            return 0.0
        self._alike = {name: str(value) for name, value in alike.items()}
        if self.axes:
            self._batch = {path or "batch": told for path, told in checksums(batch, self._calls % EVERY == 0).items()}
        self._calls += 1
        if self._calls == 1:
            self.explain()
        mesh, ranks = self._mesh, self._mesh.size
        place, others, group = 0, 1, []
        for axis, size in mesh.shape.items():
            if axis in self.axes:
                place, others = place * size + mesh.coords[axis], others * size
            else:
                group.append(mesh.coords[axis])
        # The group goes into the digest, or two groups that differ the other way round would make up for each other.
        sums = self._number((group, self._batch)) * (others * (place == 0) - 1)
        if alike:
            sums += self._number(self._alike) * (ranks * (mesh.rank == 0) - 1)
        return float(sums)

    def explain(self) -> None:
        """Hold together what the ranks were last given. Every rank that takes part calls it.

        Raises:
            RankMismatch: on all ranks, where any differ; names the leaves and the ranks.
        """
        mesh, batch_axes = self._mesh, self._plan.batch_axes
        remedy = (
            "Step all ranks from one state: made with the same arguments, restored from the same checkpoint, and with "
        )
        remedy += "the same hyper-parameters written to it."
        if self._alike:
            primitives.require_equal(mesh, "steps", self._alike, remedy, self._together)
        if not self.axes:
            return
        mine = primitives.differences(mesh, self._batch, self.axes)
        everyone = primitives.all_gather_object(mesh, self._together, mine)
        problems = list(dict.fromkeys(problem for theirs in everyone for problem in theirs))
        if problems:
            chosen = " and ".join(f"mesh.coords[{axis!r}]" for axis in batch_axes)
            remedy = f"choose it by {chosen} alone" if chosen else "pass all ranks the same"
            told = f"Ranks along {axes_named(self.axes)} work on one batch: {remedy}."
            raise RankMismatch(primitives.mismatch("batches", problems, told))

    def _number(self, value: Any) -> int:
        """A digest, of so few bits that sums over all ranks stay below 2^53, where float64 has every integer."""
        digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - (50 - self._mesh.size.bit_length()))

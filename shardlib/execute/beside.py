"""Further sharded trees that a function reads beside its parameters: teachers, reference policies, the other half of a GAN.

They come to the function by a closure, in a batch or as an argument, and are read as the parameters are: a leaf that is
stored as it is used is a plain tensor, and where a gather or a slicing is due stands a handle. Units are gathered on use, and
released, by the same `Gathering` as those of the parameters. They are frozen: gradients pass through what is computed with
them, and none is theirs.

Ranks can only gather what all of them hold. So they meet where a tree that is gathered is read first in a run, while they
agree on each gather; and a tree's units are gathered ahead of their use only once one of them has been used, for until then a
rank may not have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import storage_id
from shardlib.errors import IllegalComposition, TreeError
from shardlib.execute.gathering import Gathering
from shardlib.execute.units import BucketState, UnitState
from shardlib.mesh.mesh import Mesh
from shardlib.plan.placement import Placement
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, unflatten

Touch = Callable[[UnitState], None]


class Beside:
    """The further trees of one executor.

    Args:
        plan: of the parameters.
        touch: gathers a unit.

    Attributes:
        own: the parameters, as the function was given them: what a closure reads of them is what the function trains.
    """

    def __init__(self, plan: Plan, mesh: Mesh, gathering: Gathering, touch: Touch) -> None:
        self._plan, self._mesh, self._gathering, self._touch = plan, mesh, gathering, touch
        self._gathered: list[_Further] = []  # trees that are gathered, in the order in which a run first read them
        self._read: list[_Further] = []  # in this micro-batch
        self._params: Sharded | None = None
        self.own: Tree = None

    @property
    def gathers(self) -> bool:
        """Whether the function has read trees that are gathered."""
        return bool(self._gathered)

    @property
    def states(self) -> list[BucketState]:
        """The buckets of the trees that were read in this micro-batch."""
        return [state for further in self._read for state in further.states]

    def begin(self, params: Sharded) -> None:
        """Begin a micro-batch with these parameters."""
        self._params = params

    def close(self) -> None:
        """End the micro-batch."""
        for further in (*self._read, *self._gathered):
            further.close()
        self._read, self._params, self.own = [], None, None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a tree that is not gathered."""
        wholes = (state.whole for state in self.states)
        return storage_id(tensor.untyped_storage()) in {
            storage_id(w.untyped_storage()) for w in wholes if w is not None
        }

    def read(self, sharded: Sharded) -> Tree:
        """The tree of whole leaves, or of handles.

        Raises:
            IllegalComposition: trees that are in stages, on disk, on another mesh, or gathered within a pipeline.
            TreeError: gradients that ranks have shares of.
        """
        if self._params is not None and sharded.shares(self._params):
            return self.own
        for further in self._read:
            if further.sharded is not None and sharded.shares(further.sharded):
                return further.tree
        if sharded.role == "grad":
            if sharded.mesh.size > 1:
                raise TreeError("the loss reads sharded gradients; give it sl.unshard(gradients)")
            return sharded.shards
        further = self._further(sharded)
        further.bind(sharded, self._mesh.abstract)
        self._read.append(further)
        return further.tree

    def _further(self, sharded: Sharded) -> _Further:
        """What runs the tree: a form of it that an earlier run has read, if there is one."""
        plan, mesh = sharded.plan, sharded.mesh
        # A trace sends nothing on a mesh that has ranks: see `_Further.bind`.
        gathers = any(bucket.fetched for bucket in plan.buckets) and not self._mesh.abstract
        self._require(sharded, gathers)
        if not gathers:
            return _Further("", plan, mesh, self._touch, self._plan.step.sequence)
        self._gathering.meet_to_read()
        for known in self._gathered:
            if known.sharded is None and known.mesh is mesh and (known.plan is plan or known.plan == plan):
                return known
        name = f"further tree {len(self._gathered) + 1}: "
        further = _Further(name, plan, mesh, self._touch, self._plan.step.sequence)
        if self._gathering.admit(further.units):
            self._gathered.append(further)
        return further

    def _require(self, sharded: Sharded, gathers: bool) -> None:
        plan, mesh, own = sharded.plan, sharded.mesh, self._plan
        sliced = {style.axis for style in plan.styles.values()}
        what = ""
        if plan.stages.axes:
            what = "is in stages: shard it by a plan without sl.pipeline"
        elif sharded.on_disk is not None:
            what = "is on disk: keep it in memory with offload('host')"
        elif plan.step.tokens != own.step.tokens and any(leaf.dealt for leaf in plan.leaves):
            what = "has its experts on other ranks than the function's: give both plans the same sl.experts"
        elif gathers and own.stages.axes:
            what = "is gathered on use, and the function is in stages: shard it with sl.zero(2)"
        elif gathers and (mesh.size, mesh.rank) != (self._mesh.size, self._mesh.rank):
            what = f"is on {mesh}, and the parameters on {self._mesh}: shard both on one mesh"
        elif sliced and (mesh.shape != self._mesh.shape or sliced & set(own.batch_axes)):
            what = (
                f"is sliced over {', '.join(sorted(sliced))}, along which the function's batches differ: slice the "
                "parameters over the same axis, or this tree over none"
            )
        if what:
            raise IllegalComposition(
                f"a further sharded tree {what}. Or pass results of sl.make_eval_step(fn, params) in the batch"
            )


class _Further:
    """One further tree.

    Attributes:
        sharded: what is read, in a micro-batch that has read it.
        tree: its leaves, as a function gets them.
        used: whether a unit has been used in this micro-batch.
    """

    def __init__(self, name: str, plan: Plan, mesh: Mesh, touch: Touch, sequence: SequenceKind | None) -> None:
        self.plan, self.mesh = plan, mesh
        self._slices = Slices(mesh, sequence)
        self.states = [BucketState(bucket, mesh, plan.routes[bucket.name]) for bucket in plan.buckets]
        of_unit: dict[str, list[BucketState]] = {}
        for state in self.states:
            of_unit.setdefault(f"{name}{state.bucket.unit}", []).append(state)
        self.units = {
            unit: _Unit(self, unit, states, touch, plan.placement_of, self._slices) for unit, states in of_unit.items()
        }
        self.sharded: Sharded | None = None
        self.tree: Tree = None
        self.used = self._bound = False

    def bind(self, sharded: Sharded, abstract: bool) -> None:
        """Read the tree from ``sharded``; in an ``abstract`` trace leaves are whole, without memory."""
        self.sharded, self._bound = sharded, True
        for state in self.states:
            stored, bucket = sharded.buffers[state.bucket.name], state.bucket
            if abstract:
                state.gathers, stored = False, torch.zeros((), dtype=bucket.dtype).expand(bucket.size(0))
            state.bind(stored, None)
        leaves: dict[str, torch.Tensor] = {}
        for unit in self.units.values():
            unit.gathers = any(state.gathers for state in unit.buckets)
            if not unit.gathers:
                leaves.update(zip(unit.paths, unit.attached(), strict=True))
            leaves.update(unit.handles(trained=False))
        self.tree = unflatten(self.plan.shape.treedef, [leaves.get(leaf.path) for leaf in self.plan.leaves])

    def stand_ready(self) -> None:
        """Have zeros to exchange, on a rank that has left the trace before it read the tree."""
        if not self._bound:
            self._bound = True
            for state in self.states:
                bucket = state.bucket
                zeros = self.mesh.zeros(bucket.size(bucket.param_level), bucket.dtype, bucket.memory.param)
                state.bind(zeros, None)

    def close(self) -> None:
        for unit in self.units.values():
            unit.release()
            unit.forget()
        self._slices.clear()
        self.sharded, self.tree, self.used, self._bound = None, None, False, False


class _Unit(UnitState):
    """A unit of a further tree."""

    def __init__(
        self,
        further: _Further,
        name: str,
        states: list[BucketState],
        touch: Touch,
        placements: Mapping[str, Placement],
        slices: Slices,
    ) -> None:
        super().__init__(name, states, touch, placements, slices)
        self._further, self._coming = further, False

    def fetch(self) -> None:
        if self._further.used:
            self._start()

    def arrive(self) -> None:
        self._start()
        super().arrive()
        self._further.used = True

    def release(self) -> None:
        super().release()
        self._coming = False

    def announce(self) -> None:
        """Nothing, as no tree is on disk."""

    def _start(self) -> None:
        if not self._coming:
            self._further.stand_ready()
            self._coming = True
            super().fetch()


def unit_beside(source: Any) -> str | None:
    """The name of the unit, if it is one of a further tree."""
    return source.name if isinstance(source, _Unit) else None

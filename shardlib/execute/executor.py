"""Runs a user's function on sharded parameters, with or without gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import grad, storage_id, without_func
from shardlib.common.environment import environment, within
from shardlib.common.writes import has_place, place_of
from shardlib.execute.activation_offload import ActivationKeeper
from shardlib.execute.activation_stores import HostBuffers, host_memory, store_of
from shardlib.execute.beside import Beside, unit_beside
from shardlib.execute.blocks import Blocks
from shardlib.execute.collective_order import Record
from shardlib.execute.context import Meeting, ScaledProducts, Surroundings, WholeBatch, modules_of
from shardlib.execute.gathering import Gathering
from shardlib.execute.gradients import Gradients, ReductionOptions, Turn
from shardlib.execute.handles import Handle
from shardlib.execute.losses import refuse_reentrant_checkpoints
from shardlib.execute.phases import Phases
from shardlib.execute.recompute import require_known
from shardlib.execute.refusals import (
    explain,
    outside,
    refuse_autocast,
    refused_for_hooks,
    require_unwritten,
    storages_of,
)
from shardlib.execute.saving import SavedTensors
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.shard_tracking import FirstRun
from shardlib.execute.slicing import DealtHandle
from shardlib.execute.tiles import TiledLeaf
from shardlib.execute.units import BucketState, UnitState
from shardlib.execute.zero_bubble import Halves
from shardlib.mesh.mesh import Mesh
from shardlib.plan.drops import DropPlan
from shardlib.plan.plan import Plan
from shardlib.rng import restore_generators, states_of_generators
from shardlib.sharded.params_on_disk import BuffersOnDisk
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, unflatten

T = TypeVar("T")
_log = logging.getLogger("shardlib.execute")


class Executor:
    """Runs one function on one plan; keeps handles and the record from step to step.

    An executor runs one micro-batch at a time. `backward` runs one forward and backward. With several micro-batches in flight
    there is one executor for each, and the caller uses `open`, `differentiate` and `close`.

    Args:
        trained: whether gradients are wanted.
        record: the record that executors of the same function share; a new one by default.
        host: the host memory that executors of the same function share; by default as the plan says.

    Attributes:
        host: the host memory in which inputs of blocks are kept; None if they stay on the device.
        blocks: of the micro-batch.
    """

    plan: Plan
    mesh: Mesh

    def __init__(
        self, plan: Plan, mesh: Mesh, trained: bool, record: Record | None = None, host: HostBuffers | None = None
    ) -> None:
        self.plan, self.mesh, self._trained = plan, mesh, trained
        self._splits = trained and plan.stages.schedule.splits
        run = plan.tiled
        states = {
            unit: [
                BucketState(bucket, mesh, run.routes[bucket.name], self._splits, plan.step.tree) for bucket in buckets
            ]
            for unit, buckets in run.buckets_of.items()
        }
        self.record: Record = Record(plan, mesh) if record is None else record
        parts = SequenceParts(plan.step.sequence, mesh, self.record.done) if plan.step.sequence else None
        self._slices = Slices(mesh, plan.step.sequence)
        self._scaled = frozenset(leaf.path for leaf in plan.placements if leaf.scaled)
        tokens = Meeting(plan.step.tokens, lambda: self._gathering.meet()) if plan.step.tokens else None
        self._surroundings = Surroundings(
            mesh,
            WholeBatch(plan, mesh, trained, lambda: self._gathering.meet()),
            parts,
            modules_of(plan),
            tokens,
            plan.step.autocast,
            ScaledProducts(self._is_scaled) if self._scaled else None,
            lambda further: self._beside.read(further),
        )
        self._units = {
            unit: UnitState(unit, members, self._touch, plan.placement_of, self._slices)
            for unit, members in states.items()
        }
        self._buckets = [state for members in states.values() for state in members]
        self._tiles = [
            TiledLeaf(
                bucket,
                [self._units[tile.unit] for tile in bucket.cut],
                plan.placement_of[bucket.paths[0]],
                self._slices,
                trained,
            )
            for bucket in plan.buckets
            if bucket.tiles > 1
        ]
        self._gathering = Gathering(dict(self._units), self.record, plan.step.prefetch, plan.kept if trained else ())
        self._beside = Beside(plan, mesh, self._gathering, self._touch)
        self._handles: dict[str, dict[str, Handle]] = {}
        self._trained_handles: list[Handle] = []
        self._saved = SavedTensors(self._touch)
        self.host: HostBuffers | None = host_memory(plan.step.remat, mesh) if trained and host is None else host
        store = store_of(plan.step.remat, mesh, self.host, lambda: self.record.order is None)
        self._keeper = ActivationKeeper(plan.step.remat, store, self.in_parameters, self._saved.innermost)
        self.blocks: Blocks = Blocks(plan, trained, self._surroundings, self.record, self._slices, mesh.device)
        self._first = FirstRun(self._buckets, plan.styles, self._slices, parts, self.record.updates)
        self._halves: Halves | None = None
        self._phases: Phases | None = None  # of the micro-batch, where somebody follows it
        self._resident: dict[int, BucketState] = {}  # identity of the storage of parameters that are there -> bucket
        self._on_disk: BuffersOnDisk | None = None  # this step's parameters, if they are there
        self._held: frozenset[int] = frozenset()  # the storages of all of this rank's parameters

    @property
    def gathers(self) -> bool:
        """Whether any unit must be gathered before use, those of further trees included."""
        return self._beside.gathers or any(unit.gathers for unit in self._units.values())

    @property
    def touches(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Units in the order in which the last micro-batch gathered them, in forward and in backward."""
        fetched, turn = self._gathering.fetched, self._gathering.turned
        return tuple(fetched[:turn]), tuple(fetched[turn:] if turn is not None else ())

    @property
    def reduced(self) -> tuple[str, ...]:
        """Trained units in the order in which their gradients are complete; none before the first backward."""
        return tuple(self.record.order or ())

    def gradients(self, options: ReductionOptions) -> Gradients:
        """The sums of one step's gradients, for its micro-batches to add to."""
        return Gradients(self.plan, self.mesh, options)

    def forward(self, params: Sharded, fn: Callable[[Tree], Any]) -> Any:
        """``outside(fn(parameters))`` without gradients. Calls ``fn`` again if ranks turn out to use different parameters."""
        while True:
            trusted, draws = not self.record.agreeing, states_of_generators(self.mesh.device)
            try:
                self._bind(params, None)
                with self._running(), torch.no_grad():
                    result = self._attempt(lambda: outside(self._call(fn), "the result", self.in_parameters))
                self._gathering.finish()
            finally:
                self.close()
            if not ((self.gathers or self.record.strayed) and trusted and self.record.any_strayed()):
                return result
            restore_generators(draws)

    def backward(
        self,
        params: Sharded,
        gradients: Gradients,
        turn: Turn,
        fn: Callable[[Tree], tuple[Sequence[torch.Tensor], T]],
        seeds: Callable[[T | None], Sequence[torch.Tensor]],
        drops: DropPlan | None,
    ) -> T | None:
        """Run one micro-batch: ``totals, rest = fn(parameters)``, and add the totals' gradients × ``seeds(rest)`` to
        ``gradients``. Without seeds there is no backward.

        Returns ``rest``, or None if the step will be repeated because this rank left the trace.
        """
        try:
            totals, rest = self._attempt(lambda: self.open(params, gradients, fn, drops)) or ((), None)
            if totals and self.record.order is None:
                for total in totals:
                    refuse_reentrant_checkpoints(total)
                self.require_names()
                if self.mesh.rank == 0 and not self.mesh.abstract:
                    self.blocks.tell_of_none()
            self._gathering.turn()
            # The loss of one micro-batch may be a constant.
            started = [(total, seed.to(total.dtype)) for total, seed in zip(totals, seeds(rest)) if total.requires_grad]
            outputs, cotangents = zip(*started) if started else ((), ())
            self.differentiate(outputs, cotangents, (), gradients, turn)
            gradients.land()
            return rest
        finally:
            self.close()

    def open(
        self, params: Sharded, gradients: Gradients, fn: Callable[[Tree], Any], drops: DropPlan | None = None
    ) -> Any:
        """``fn(parameters)`` with a graph, which is kept until `close`. ``drops`` says what it leaves out.

        ``fn`` is called again if it calls `torch.func` for the first time: see `Record.holds`.
        """
        self._bind(params, gradients, drops)
        hooked = self.gathers and not self.record.holds
        draws = states_of_generators(self.mesh.device) if hooked else None
        try:
            with self._running(), torch.enable_grad(), self._saved.hooks() if hooked else nullcontext():
                return self._call(fn)
        except RuntimeError as error:
            if draws is None or not refused_for_hooks(error):
                raise
            self._hold()
            if self._gathering.strayed:
                raise
        self.close()
        restore_generators(draws)
        return self.open(params, gradients, fn, drops)

    def _hold(self) -> None:
        """Keep what the graph keeps of gathered parameters, from now on. On a rank that follows a trace the step is repeated,
        as the trace's backward gathers."""
        self.record.holds = True
        self._gathering.strayed = not self.record.agreeing
        if self.mesh.rank == 0 and not self.mesh.abstract:
            _log.warning(
                "torch.func is called in the loss: what it uses of gathered parameters stays on the device until backward, "
                "since its transforms allow no hooks on saved tensors (print(plan) has the bytes)"
            )

    def require_names(self) -> None:
        """Refuse names of values to keep that no block has used so far."""
        if self.plan.step.remat:
            require_known(self.plan.step.remat.save, self.record.names)

    def in_parameters(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of parameters, as stored or as gathered."""
        stored = storage_id(tensor.untyped_storage()) in self._held or self._beside.holds(tensor)
        return stored or self._saved.bucket_with(tensor) is not None

    def _is_scaled(self, factor: torch.Tensor) -> bool:
        """Whether products by a matrix are in 8 bits: a parameter, or a view of one."""
        if isinstance(factor, Handle):
            return factor._path in self._scaled
        state = self._bucket_with(factor) if has_place(factor) else None
        if state is None or state.whole is None:
            return False
        begins = place_of(factor)[1] - place_of(state.whole)[1]
        return state.bucket.path_at(begins // state.whole.itemsize) in self._scaled

    def unit_of(self, leaf: torch.Tensor) -> str:
        """The unit of a parameter, as the function sees it; "" for other tensors."""
        if isinstance(leaf, Handle):
            own = self.plan.placement_of.get(leaf._path)
            return unit_beside(leaf._source) or ("" if own is None else self.plan.bucket_of[own.bucket].unit)
        state = self._bucket_with(leaf)
        return "" if state is None else state.bucket.unit

    def _bucket_with(self, leaf: torch.Tensor) -> BucketState | None:
        """The bucket in whose memory, gathered or there all the time, a tensor lies; None for other tensors."""
        if found := self._saved.bucket_with(leaf):
            return found[1]
        if not self._resident:
            wholes = ((state, state.whole) for state in self._buckets if not state.gathers)
            self._resident = {storage_id(w.untyped_storage()): state for state, w in wholes if w is not None}
        return self._resident.get(storage_id(leaf.untyped_storage()))

    def rest(self) -> None:
        """Release all gathered parameters until the backward starts."""
        self._gathering.rest()
        self._keeper.rest()

    def inputs_gradient(
        self, outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The first half of a backward from ``outputs``: the gradients of ``inputs``. `weights_gradient` runs the second.

        All gathered parameters are released in between.
        """
        self._keeper.turn(last=False)
        with self._running(backward=True):
            self._halves = Halves(outputs, seeds, inputs)
        self.rest()
        return self._halves.inputs

    def weights_gradient(self, gradients: Gradients, turn: Turn) -> None:
        """The second half of a backward: adds parameters' gradients to ``gradients``. ``turn`` as in `differentiate`."""
        assert self._halves is not None
        with self._summing(gradients, turn) as reached:
            self._halves.weights_gradient()
            reached |= self._halves.reached

    def differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        turn: Turn,
    ) -> tuple[torch.Tensor | None, ...]:
        """A backward from ``outputs``: adds parameters' gradients to ``gradients`` and returns the gradients of ``inputs``.

        Their reductions may be under way until `Gradients.land`, so that the caller may pass the gradients of ``inputs`` on.

        Args:
            turn: the turn of this backward among those of the step that add to ``gradients``.
        """
        handles = self._trained_handles
        anchors = [state.anchor for state in self._buckets if state.anchor is not None]
        wanted = [*anchors, *handles, *inputs]
        nothing = (None,) * len(wanted)
        self._keeper.turn(last=True)
        with self._summing(gradients, turn) as reached:
            grads = self._attempt(lambda: grad(outputs, wanted, seeds)) if outputs and wanted else nothing
            grads = grads or nothing
            for handle, value in zip(handles, grads[len(anchors) :]):
                if value is not None:
                    reached[handle._path] = value
        return grads[len(wanted) - len(inputs) :]

    @contextmanager
    def _summing(self, gradients: Gradients, turn: Turn) -> Iterator[dict[str, torch.Tensor]]:
        """A context that sums parameters' gradients. Yields a dict, path -> gradient, for those that arrive at handles."""
        gradients.begin(turn, self._gathering)
        for state in self._buckets:
            state.summing = gradients
        reached: dict[str, torch.Tensor] = {}
        with self._running(backward=True):
            yield reached
            gradients.note(reached, reached.values())
            gradients.finish(self._late(reached))

    def _attempt(self, run: Callable[[], T]) -> T | None:
        """``run()``; None if it fails on a rank that computes with zeros: one that has left the trace, or that could not read
        parameters of a training step."""
        try:
            return run()
        except Exception:
            unread = self._trained and self._on_disk is not None and self._on_disk.files.unread is not None
            if not (self._gathering.strayed or unread):
                raise
            return None

    def close(self) -> None:
        """Free the graph and all gathered parameters."""
        self._halves = None
        self._keeper.close()
        self._gathering.close()
        for unit in self._units.values():
            unit.forget()
        self._beside.close()
        self._saved.clear()
        self._slices.clear()
        self.record.layer_tokens += self.blocks.layers.end()
        self._on_disk, self._held, self._phases = None, frozenset(), None

    def _call(self, fn: Callable[[Tree], Any]) -> Any:
        """``fn(parameters)``. Raises `HandleError` for uses of parameters that are not supported."""
        try:
            leaves = self._leaves()
            in_order = [leaves.get(leaf.path) for leaf in self.plan.leaves]
            self.blocks.layers.know(in_order)
            if self._phases is not None:
                self._phases.knows(leaves)
            self._beside.own = unflatten(self.plan.shape.treedef, in_order)
            with self._first.call(leaves):
                result = fn(self._beside.own)
            self._first.require_own(result)
            require_unwritten([*self._buckets, *self._beside.states], self.gathers)
            self.blocks.layers.require_all()
            if self._surroundings.modules is not None and self._trained:
                self._surroundings.modules.require_some()
            return result
        except (RuntimeError, ValueError) as error:
            require_unwritten([*self._buckets, *self._beside.states], self.gathers, error)
            explained = self._slices.explain(error) or explain(error, self.plan, self.record.holds)
            if explained:
                raise explained from error
            raise

    def _leaves(self) -> dict[str, torch.Tensor]:
        """Path -> what the function is given for each parameter of this rank's stage."""
        leaves: dict[str, torch.Tensor] = {}
        for unit in self._units.values():
            if unit.name not in self._handles:
                self._handles[unit.name] = made = unit.handles(self._trained)
                self._trained_handles += [handle for handle in made.values() if handle.requires_grad]
            if not unit.gathers:
                leaves.update(zip(unit.paths, unit.attached(), strict=True))
            leaves.update(self._handles[unit.name])
        leaves.update({leaf.path: leaf.handle for leaf in self._tiles})
        for path, leaf in leaves.items():
            if isinstance(leaf, Handle) and (axes := self.plan.placement_of[path].dealt):
                leaves[path] = DealtHandle.make(leaf, path, axes)
        return leaves

    def _bind(self, params: Sharded, gradients: Gradients | None, drops: DropPlan | None = None) -> None:
        """Bind this step's parameters and gradients to the buckets."""
        self._beside.begin(params)
        self._on_disk = params.on_disk
        self._held = storages_of(params)
        agreeing = self.record.agreeing and not self.mesh.abstract
        self.blocks.begin()
        self.blocks.layers.begin(drops, computes=agreeing)
        self._resident, follow = {}, environment().phases_of
        self._phases = None if follow is None else follow(self)
        if self._phases is not None:
            self._phases.begin()
        stored = {
            cut.name: part
            for bucket in self.plan.buckets
            for cut, part in zip(bucket.cut, params.parts(bucket), strict=True)
        }
        for state in self._buckets:
            state.bind(stored[state.bucket.name], gradients)
        self._gathering.begin(self.plan.tiled.units_left_out(drops), computed=agreeing)

    @contextmanager
    def _running(self, backward: bool = False) -> Iterator[None]:
        """The context of the user's code, in forward and in recomputation during backward."""
        wraps_blocks = (
            self.gathers or self.plan.step.remat or self.plan.styles or self.plan.step.has_drops or self._scaled
        )
        run = self.blocks.run if wraps_blocks else None
        phases = self._phases
        with (
            within(blocks=phases.around(run) if phases else run, keeper=self._keeper),
            self._surroundings.installed(casts=not backward),
            phases.running(backward) if phases else nullcontext(),
        ):
            yield

    def _touch(self, unit: UnitState) -> None:
        if unit is self._gathering.current:
            return
        unit.require_given()
        refuse_autocast(unit, self.plan, self.mesh.device)
        # The first touch may be in inference_mode, or inside a transform of torch.func, and a later one outside.
        with torch.inference_mode(False), without_func():
            self._gathering.touch(unit)
        self._saved.note_gathered(unit)

    def _late(self, reached: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bucket name -> packed gradients of leaves that arrived at handles."""
        late = {}
        for state in self._buckets:
            leaves = [reached.get(path) for path in state.bucket.paths]
            if any(leaf is not None for leaf in leaves):
                late[state.bucket.name] = state.bucket.pack(leaves, state.bucket.reduce_dtype)
        return late

"""Runs a user's function on sharded parameters, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardlib._compat import FUSED_ATTENTIONS, func_transform, grad, is_compiled, no_modes, storage_id
from shardlib.collectives.styles.slices import Slices
from shardlib.errors import HandleError
from shardlib.execute.gathering import Gathering
from shardlib.execute.gradients import Gradients, Route
from shardlib.execute.halves import Halves
from shardlib.execute.handles import MAX_NORM, Handle
from shardlib.execute.losses import refuse_reentrant_checkpoints
from shardlib.execute.products import readable_twice
from shardlib.execute.record import Record
from shardlib.execute.saving import SavedTensors
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import gathered, refuse_slices
from shardlib.execute.units import BucketState, UnitState
from shardlib.mesh.mesh import Mesh, current_mesh
from shardlib.nn.blocks import block_runner
from shardlib.nn.sequence import current_parts
from shardlib.plan.plan import Plan
from shardlib.rng import restore_generators, states_of_generators
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tree_map, unflatten

T = TypeVar("T")


class Executor:
    """Everything about running one function on one plan that outlives a step: handles, and the record.

    It runs one micro-batch at a time. `backward` runs one forward and backward; a pipeline, which has several under
    way, has an executor for each and calls `open`, `differentiate` and `close` itself.

    Args:
        trained: whether gradients are wanted.
        record: shared by executors that run the same function.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, record: Record | None = None) -> None:
        self.plan, self.mesh, self._trained = plan, mesh, trained
        self._splits = trained and plan.stages.schedule.splits
        states = {
            unit: [BucketState(bucket, mesh, plan.routes[bucket.name], self._splits) for bucket in buckets]
            for unit, buckets in plan.buckets_of.items()
        }
        self.record = Record(plan, mesh) if record is None else record
        self._parts = SequenceParts(plan.step.sequence, mesh, self.record.done) if plan.step.sequence else None
        self._slices = Slices(mesh, plan.step.sequence)
        self._units = {
            unit: UnitState(unit, members, self._touch, plan.placement_of, self._slices)
            for unit, members in states.items()
        }
        self._buckets = [state for members in states.values() for state in members]
        self._gathering = Gathering(dict(self._units), self.record, plan.step.prefetch)
        self._handles: dict[str, dict[str, Handle]] = {}
        self._trained_handles: list[Handle] = []
        self._saved = SavedTensors(self._touch)
        self._halves: Halves | None = None
        self._held: Iterable[torch.Tensor] = ()  # the memory of all of this rank's parameters

    @property
    def gathers(self) -> bool:
        """Whether any unit must be gathered before use."""
        return any(unit.gathers for unit in self._units.values())

    @property
    def touches(self) -> tuple[str, ...]:
        """Units in the order the last micro-batch gathered them."""
        return tuple(self._gathering.fetched)

    def gradients(self, route: Route) -> Gradients:
        """What the micro-batches of one step hand their gradients to."""
        return Gradients(self.plan, self.mesh, route)

    def forward(self, params: Sharded, fn: Callable[[Tree], Any]) -> Any:
        """``fn(parameters)`` without gradients, as `outside` gives it. Called again where ranks turn out to differ."""
        while True:
            trusted, draws = not self.record.agreeing, states_of_generators(self.mesh.device)
            try:
                self._bind(params, None)
                with self._running(), torch.no_grad():
                    result = self._attempt(lambda: self.outside(self._call(fn)))
                self._gathering.finish()
            finally:
                self.close()
            if not (self.gathers and trusted and self.record.meet()):
                return result
            restore_generators(draws)

    def backward(
        self,
        params: Sharded,
        gradients: Gradients,
        last: bool,
        fn: Callable[[Tree], tuple[torch.Tensor, Any]],
        seed: torch.Tensor,
    ) -> Any:
        """One micro-batch: ``total, rest = fn(parameters)``, then the gradient of ``total`` × ``seed``.

        Returns ``rest``, or None where the step will be taken again; the gradients go to ``gradients``.
        """
        try:
            total, rest = self._attempt(lambda: self.open(params, gradients, fn)) or (None, None)
            if total is not None and self.record.order is None:
                refuse_reentrant_checkpoints(total)
            self._gathering.turn()
            outputs = [] if total is None or not total.requires_grad else [total]  # one micro-batch's may be a constant
            self.differentiate(outputs, [seed.to(output.dtype) for output in outputs], (), gradients, last)
            return rest
        finally:
            self.close()

    def open(self, params: Sharded, gradients: Gradients, fn: Callable[[Tree], Any]) -> Any:
        """``fn(parameters)``; the graph is kept until `close`."""
        self._bind(params, gradients)
        with self._running(), torch.enable_grad(), self._saved.hooks() if self.gathers else nullcontext():
            return self._call(fn)

    def outside(self, tree: Tree) -> Tree:
        """What a running function gives, to be kept when it is over: values of now, outside the graph.

        What lies in a parameter's memory is copied, since that is written to by the optimizer, or held only for a while.
        Handles are gathered, on every rank; a slice is refused.
        """
        held = {storage_id(buffer.untyped_storage()) for buffer in self._held}

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            with torch.no_grad():
                if isinstance(leaf, Handle):
                    return leaf.clone()
                leaf = leaf.detach()
                if leaf.layout is not torch.strided:
                    return leaf
                lies_in = storage_id(leaf.untyped_storage()) in held or self._saved.place(leaf) is not None
                return leaf.clone() if lies_in else leaf

        return tree_map(kept, tree) if tree is not None else None

    def rest(self) -> None:
        """Hold no gathered parameters until the backward comes."""
        self._gathering.rest()

    def inputs_gradient(
        self, outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The first half of a backward from ``outputs``: the gradients of ``inputs``. `weights_gradient` is the other."""
        with self._running():
            self._halves = Halves(outputs, seeds, inputs)
        return self._halves.inputs

    def weights_gradient(self, gradients: Gradients, last: bool) -> None:
        """The second half: parameters' gradients go to ``gradients``. ``last`` as in `differentiate`."""
        assert self._halves is not None
        with self._summing(gradients, last) as reached:
            self._halves.weights_gradient()
            reached |= self._halves.reached

    def differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        last: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Backward from ``outputs``: parameters' gradients go to ``gradients``, those of ``inputs`` are returned.

        ``last`` when it is the step's last with these gradients.
        """
        handles = self._trained_handles
        anchors = [state.anchor for state in self._buckets if state.anchor is not None]
        wanted = [*anchors, *handles, *inputs]
        nothing = (None,) * len(wanted)
        with self._summing(gradients, last) as reached:
            found = self._attempt(lambda: grad(outputs, wanted, seeds)) if outputs and wanted else nothing
            found = found or nothing
            for handle, value in zip(handles, found[len(anchors) :]):
                if value is not None:
                    reached[handle._path] = value
        return found[len(wanted) - len(inputs) :]

    @contextmanager
    def _summing(self, gradients: Gradients, last: bool) -> Iterator[dict[str, torch.Tensor]]:
        """While parameters' gradients come; what reaches handles themselves is to be put, by path, into the dict."""
        gradients.begin(last, self._gathering)
        for state in self._buckets:
            state.summing = gradients
        reached: dict[str, torch.Tensor] = {}
        with self._running():
            yield reached
            gradients.note(reached, reached.values())
            gradients.finish(self._late(reached))

    def _attempt(self, run: Callable[[], T]) -> T | None:
        """What ``run`` gives; None where it fails on the zeros that a run which left the trace is given."""
        try:
            return run()
        except Exception:
            if not self._gathering.strayed:
                raise
            return None

    def close(self) -> None:
        """Let go of the graph and of everything that was gathered."""
        self._halves = None
        self._gathering.end()
        for unit in self._units.values():
            unit.forget()
        self._saved.clear()
        self._slices.clear()
        self._held = ()

    def _call(self, fn: Callable[[Tree], Any]) -> Any:
        """``fn(parameters)``. Raises `HandleError` where it does with them what cannot be honoured."""
        try:
            result = fn(self._tree())
            self._require_unwritten()
            return result
        except (RuntimeError, ValueError) as error:
            self._require_unwritten(error)
            if explained := self._slices.explain(error):
                raise explained from error
            # torch.func's grad refuses to start where tensors are saved through hooks.
            if self.gathers and "saved tensor hooks" in str(error):
                raise HandleError(
                    "torch.func inside the loss differentiates while parameters are gathered on use (ZeRO stage 3), which "
                    "its transforms do not support. Use torch.autograd.grad there, or zero(stage=2)"
                ) from error
            raise

    def _require_unwritten(self, error: Exception | None = None) -> None:
        """Refuse functions that have written to parameters in place, whatever ``error`` came of it."""
        for state in self._buckets:
            state.look()
        written = [path for state in self._buckets if state.written for path in state.bucket.paths]
        if written and not isinstance(error, HandleError):
            whole = "" if self.gathers else " This state holds what was written: go on from another."
            raise HandleError(
                f"the function writes in place to a parameter, one of {', '.join(written)}; parameters are inputs of a pure "
                f"function. Return the change as an output (buffers=), or work on a copy: p.clone(). {MAX_NORM}{whole}"
            ) from error

    def _tree(self) -> Tree:
        leaves: dict[str, torch.Tensor] = {}
        for unit in self._units.values():
            if unit.name not in self._handles:
                self._handles[unit.name] = made = unit.handles(self._trained)
                self._trained_handles += [handle for handle in made.values() if handle.requires_grad]
            if not unit.gathers:
                leaves.update(zip(unit.paths, unit.attached(), strict=True))
            leaves.update(self._handles[unit.name])
        return unflatten(self.plan.shape.treedef, [leaves.get(leaf.path) for leaf in self.plan.leaves])

    def _bind(self, params: Sharded, gradients: Gradients | None) -> None:
        """Take this step's parameters."""
        self._held = params.buffers.values()
        for state in self._buckets:
            state.bind(params.buffers[state.bucket.name], gradients)
        self._gathering.begin()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """While the user's code runs, forward or again in backward."""
        minds_blocks = self.gathers or self.plan.step.remat or self.plan.styles
        runner = block_runner.set(self._run_block if minds_blocks else None)
        try:
            with self._here():
                yield
        finally:
            block_runner.reset(runner)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """What functions of a model find their surroundings by."""
        mesh, parts = current_mesh.set(self.mesh), current_parts.set(self._parts)
        try:
            yield
        finally:
            current_mesh.reset(mesh)
            current_parts.reset(parts)

    def _touch(self, unit: UnitState) -> None:
        if func_transform() is not None:
            raise HandleError(
                f"torch.func inside the loss reaches unit {unit.name!r}, whose parameters are gathered on use (ZeRO stage "
                "3), and its transforms cannot cross the gather. Use zero(stage=2), or take the parameters first: "
                "w = p.clone() outside the torch.func call"
            )
        if unit is self._gathering.current:
            return
        if torch.is_autocast_enabled(self.mesh.device.type):
            raise HandleError(
                f"autocast is on while unit {unit.name!r} is gathered (ZeRO stage 3); its casts would keep whole parameters "
                "alive. Use sl.precision('bf16') in the plan instead, with keep=[...] for what must stay in fp32"
            )
        with torch.inference_mode(False):  # the first touch may lie in inference_mode, and a later one not
            self._gathering.touch(unit)
        self._saved.arrived(unit)

    def _run_block(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Gathering is no part of the block: a recompute policy must neither see nor keep its operations.
            with no_modes():
                args, kwargs = gathered((args, kwargs))
            if self.plan.styles and is_compiled(fn):
                refuse_slices((args, kwargs))
            return fn(*args, **kwargs)

        if self.plan.step.remat is None or not self._trained:
            return call(*args, **kwargs)

        # The surroundings travel with the call: recompute may run in a thread of autograd's.
        def again(*args: Any, **kwargs: Any) -> Any:
            with self._here(), readable_twice() if self._splits else nullcontext():
                return call(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, **_policy(self.plan.step.remat), **kwargs)

    def _late(self, reached: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What reached handles themselves, packed per bucket."""
        late = {}
        for state in self._buckets:
            leaves = [reached.get(path) for path in state.bucket.paths]
            if any(leaf is not None for leaf in leaves):
                late[state.bucket.name] = state.bucket.pack(leaves, state.bucket.reduce_dtype)
        return late


def _policy(remat: Any) -> dict[str, Any]:
    if remat == "full":
        return {}
    return {"context_fn": partial(create_selective_checkpoint_contexts, _keep_dots if remat == "dots" else remat)}


_DOTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    *FUSED_ATTENTIONS,
}


def _keep_dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DOTS else CheckpointPolicy.PREFER_RECOMPUTE

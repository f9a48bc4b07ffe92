"""The runner of a step as one graph for each form of batch; what cannot be traced runs as it does without a graph."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.tree_sum import Node, TreeSum, joined
from shardlib.common._compat import storage_id
from shardlib.common.originals import CopiedModule, called_in
from shardlib.errors import BatchError, HandleError, IllegalComposition, RankMismatch
from shardlib.execute.batches import batch_index
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.alive import order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.land import Land
from shardlib.execute.graph.passes import optimised
from shardlib.execute.graph.text import described
from shardlib.execute.graph.trace import Traced, trace
from shardlib.execute.losses import Outcome
from shardlib.execute.opaque import storages_of
from shardlib.execute.record import Record
from shardlib.execute.stages.base import Call, detached
from shardlib.execute.stages.one import OneStage
from shardlib.execute.totals import Totals
from shardlib.execute.values.function import Function
from shardlib.execute.values.refusals import missing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.sharded.landing import Landing
from shardlib.sharded.on_disk import BufferOnDisk
from shardlib.tree import flatten

_log = logging.getLogger("shardlib.execute")
MOST = 8  # forms of batches, each of which takes a trace
_HERE = Path(__file__).parents[2]  # the library
_TORCH = Path(torch.__file__).parent


class GraphStage:
    """Runs a loss function on a plan with one stage, as graphs.

    The first step runs without a graph, as all that is checked of a loss function is in its first run.

    Args:
        without: the names of passes that are left out.

    Raises:
        IllegalComposition: a plan with transforms that a graph does not have.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        trained: bool = True,
        with_buffers: bool = False,
        without: Collection[str] = (),
    ) -> None:
        require_graph(plan)
        self._fn, self._plan, self._mesh, self._with_buffers, self._without = fn, plan, mesh, with_buffers, without
        self._function = Function(fn, plan, mesh, trained)
        self._eager = OneStage(fn, plan, mesh, trained, with_buffers)  # the first step, and what cannot be traced
        self._graphs: dict[Any, Traced] = {}
        self._modules: set[CopiedModule] = set()  # of which copies are called in the graphs
        self._order: list[Any] | None = None  # of exchanges, in the first graph
        self._first: Sequence[Any] | None = None  # the micro-batches of the first step, which may be taken again
        self._traceable = True

    @property
    def records(self) -> Sequence[Record]:
        return self._eager.records

    @property
    def graphs(self) -> Sequence[Traced]:
        """The graphs traced so far."""
        return list(self._graphs.values())

    def __str__(self) -> str:
        if not self._traceable:
            return "no graph: the loss function cannot be traced, and runs as without compile=True"
        return "\n\n".join(described(traced.module.graph) for traced in self.graphs) or "no graph yet: take a step"

    def train(self, call: Call, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._traceable and options.reached is not None:
            raise IllegalComposition(
                "compile=True does not tell which parameters were used: leave out optim.skip_unused"
            )
        if not self._traceable or self._first is None or self._first is call.microbatches:
            held = self._eager.train(call, totals, options)
            if self._first is None:
                self._first = call.microbatches
                self._try(call, self._kept(options))
            return held
        self._first = ()
        if any(module.differs() for module in self._modules):  # a graph has the modules as they were
            self._graphs.clear()
            self._modules.clear()
        gradients = _Gradients(self._plan, self._mesh, options.landing)
        kept = self._kept(options)
        for index in range(len(call.microbatches)):
            outcome, new, kept = self._microbatch(
                call, index, totals.buffers if index else call.buffers, kept, gradients.land
            )
            gradients.add(index, new)
            totals.add(outcome)
        held = gradients.sums()
        if not self._reduces(call):
            held = self._function.reduced(held, kept, options.unreduced)
        options.residuals.after |= kept
        return held

    def shared_aux(self, call: Call, aux: Any, sums: Any) -> Any:
        return aux

    def evaluate(self, params: Any, *args: Any) -> Any:
        return self._eager.evaluate(params, *args)

    def _reduces(self, call: Call) -> bool:
        """Whether a graph sums gradients over ranks as the optimizer holds them: not where an optimizer sums over an axis
        itself, in some steps alone, or ranks send nodes of a tree."""
        plan = self._plan
        return len(call.microbatches) == 1 and plan.reductions.owner is None and not plan.step.tree

    def _kept(self, options: ReductionOptions) -> dict[str, torch.Tensor]:
        """What codecs keep, by name."""
        return {name: options.residuals.after[name] for channel in self._plan.channels for name in channel.keeps}

    def _microbatch(
        self, call: Call, index: int, buffers: Any, kept: dict[str, torch.Tensor], land: Land
    ) -> tuple[Outcome, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The outcome of a micro-batch, its gradients, and what codecs keep then."""
        batch, key = call.microbatches[index], call.keys[index]
        traced = self._traced(call, index, buffers, kept)
        stored = [part for bucket in self._plan.buckets for part in call.params.parts(bucket)]
        start = call.loss_scale * (1.0 if traced.form.weighted else call.share)
        seed = torch.full((), start, dtype=torch.float64, device=self._mesh.device)
        tensors = [leaf for leaf in (*flatten(batch)[1], *flatten(buffers)[1]) if isinstance(leaf, torch.Tensor)]
        draws = [] if key is None else traced.stands.values(key)
        with torch.no_grad(), seeding_torch(key, self._mesh.device):
            outputs = traced.module(*stored, *tensors, *kept.values(), seed, *draws, land)
        means, aux, after, rest = traced.form.results(outputs)
        outcome = Outcome(means, traced.form.weighted, aux, after)
        names = [bucket.name for bucket in self._plan.trained]
        held = storages_of(call.params)
        outcome = detached(outcome, lambda tensor: storage_id(tensor.untyped_storage()) in held)
        results = dict(zip((*names, *kept), rest, strict=True))
        return outcome, {name: results[name] for name in names}, {name: results[name] for name in kept}

    def _traced(self, call: Call, index: int, buffers: Any, kept: dict[str, torch.Tensor]) -> Traced:
        """The graph of a micro-batch of this form."""
        form = self._form(call, index, buffers)
        if form not in self._graphs:
            if len(self._graphs) >= MOST:
                raise BatchError(
                    f"compile=True: the {MOST + 1}th form of the loss's inputs, each of which takes a trace of its own. "
                    f"{_changing(form, self._graphs)}"
                )
            traced = self._trace(call, index, buffers, kept)
            if self._order is not None and order_of(traced.module.graph) != self._order:
                raise HandleError(
                    "compile=True: with a batch of another form the loss exchanges in another order than at first, and ranks "
                    "whose batches differ would wait for each other. Let the order of layers not depend on the batch's sizes"
                )
            form = self._form(call, index, buffers)  # after the trace: a count of the loss's own calls goes on in it
            self._graphs[form] = traced
        return self._graphs[form]

    def _trace(self, call: Call, index: int, buffers: Any, kept: dict[str, torch.Tensor]) -> Traced:
        plan, mesh, reduces = self._plan, self._mesh, self._reduces(call)
        traced, modules = called_in(
            lambda: trace(
                lambda blocks: Function(self._fn, plan, mesh, True, blocks),
                {bucket.name: _like(call.params.parts(bucket)[0], bucket) for bucket in plan.buckets},
                kept,
                call.microbatches[index],
                buffers if self._with_buffers else None,
                call.keys[index],
                reduces,
                call.named(index, mesh),
            )
        )
        self._modules.update(modules)
        lands = [
            bucket.name if bucket.memory.optimizer != "device" and (reduces or plan.lands_each(bucket)) else None
            for bucket in plan.trained
        ]
        return optimised(traced, plan.step.remat, lands, self._without)

    def _form(self, call: Call, index: int, buffers: Any) -> Any:
        """What a graph depends on: the structure of its inputs, the form of tensors, all other leaves, whether there is a
        key, and what the loss function closes over."""

        def of(tree: Any) -> tuple[Any, ...]:
            paths, leaves, treedef = flatten(tree)
            forms = [
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
                for leaf in leaves
            ]
            return treedef, tuple(zip(paths, forms, strict=True))

        return of(call.microbatches[index]), of(buffers), call.keys[index] is None, closed_over(self._fn)

    def _try(self, call: Call, kept: dict[str, torch.Tensor]) -> None:
        """Trace the first micro-batch; all ranks have graphs of the same exchanges, or none has a graph. Collective."""
        why = ""
        try:
            traced = self._trace(call, 0, call.buffers, kept)
        except Exception as error:
            why = str(error) if isinstance(error, IllegalComposition) else _told(error)
        else:
            self._graphs[self._form(call, 0, call.buffers)] = traced
            self._order = order_of(traced.module.graph)
        orders = primitives.all_gather_object(self._mesh, list(self._mesh.shape), (why, self._order))
        if not any(text for text, _ in orders):
            if any(order != self._order for _, order in orders):
                raise RankMismatch(
                    "compile=True: the ranks' graphs exchange in different orders. Let the loss function run the same layers "
                    "on every rank, or leave out compile=True"
                )
            return
        rank, text = next((rank, text) for rank, (text, _) in enumerate(orders) if text)
        if self._mesh.rank == 0:
            _log.warning(
                "compile=True: the loss function cannot be traced, and steps run as without it (rank %d: %s)",
                rank,
                text,
            )
        self._graphs.clear()
        self._traceable = False


class _Gradients:
    """One step's gradients, summed over micro-batches: on the device, or where they land."""

    def __init__(self, plan: Plan, mesh: Mesh, landing: Landing | None) -> None:
        self._plan, self._landing = plan, landing
        self._held: dict[str, torch.Tensor] = {}
        self._landed: dict[str, torch.Tensor] = {}
        leaves = plan.step.total_microbatches
        self._trees = {} if leaves is None else {bucket.name: TreeSum[torch.Tensor](leaves) for bucket in plan.trained}
        self._first = batch_index(plan, mesh) * plan.step.microbatches  # the first micro-batch of this rank, among all

    def land(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """See `shardlib.execute.graph.land`."""
        bucket = self._plan.bucket_of[name]
        if self._landing is None or not self._landing.takes(bucket):
            return gradient
        self._landed[name] = self._landing.take(bucket, gradient)
        return self._landed[name]

    def add(self, index: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add those of one micro-batch, whose memory may be used up."""
        for name, new in gradients.items():
            if name in self._landed:
                continue
            if self._trees:
                self._trees[name].add(Node(0, self._first + index), new)
            else:
                self._held[name] = self._held[name].add_(new) if name in self._held else new

    def sums(self) -> dict[str, torch.Tensor]:
        """Bucket name -> the sum, or as many as there are nodes of the tree in which micro-batches are added."""
        nodes = self._plan.step.nodes
        return self._held | self._landed | {name: joined(tree.sums, nodes) for name, tree in self._trees.items()}


def _like(stored: torch.Tensor | BufferOnDisk, bucket: Bucket) -> torch.Tensor:
    """A tensor of the form of a stored buffer."""
    if isinstance(stored, torch.Tensor):
        return stored
    return torch.zeros((), dtype=bucket.dtype).expand(bucket.size(bucket.param_level))


def require_graph(plan: Plan) -> None:
    """Refuse a plan that a graph does not have. Raises `IllegalComposition`, with all transforms."""
    lacks, how = missing(plan), plan.step.remat
    if how is not None and (how.save or how.policy not in ("full", "dots")):
        lacks.append("remat(save=), policies of your own: use remat() or remat('dots')")
    if lacks:
        listed = "\n".join(f"- {each}" for each in lacks)
        raise IllegalComposition(f"compile=True does not go together with\n{listed}\nOr leave it out")


def _changing(form: Any, known: Collection[Any]) -> str:
    """What differs between a form and the last known one, and a remedy."""
    ((_, leaves), _, _, closed), ((_, before), _, _, closed_before) = form, list(known)[-1]
    if changed := [name for name, value in closed if dict(closed_before).get(name) != value]:
        return (
            f"{', '.join(changed)} changes, which the loss function reads and is not given: put torch.tensor(value) into the "
            "batch, which is an input"
        )
    old = dict(before)
    others = [(path, now) for path, now in leaves if old.get(path) != now]
    numbers = [path for path, now in others if isinstance(now, str)]
    if numbers:
        return (
            f"{', '.join(numbers)} of the batch changes and is no tensor: pass torch.tensor(value), which is an input"
        )
    return f"{', '.join(path or 'the batch' for path, _ in others)} changes in shape: pad batches to a few lengths"


def _told(error: Exception) -> str:
    """An error of a trace, with the line of the user's that raised it, or else the last one, and a remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not Path(frame.filename).is_relative_to(_TORCH) and not frame.filename.startswith("<")
    ]
    users = [frame for frame in own if _HERE not in Path(frame.filename).parents] or own or list(frames)
    line, last = str(error).strip().partition("\n")[0], users[-1]
    return (
        f"{type(error).__name__}: {line}, at {last.filename}:{last.lineno} ({last.line}). Let the loss compute with tensors "
        "alone: torch.where in place of if, and no .item()"
    )

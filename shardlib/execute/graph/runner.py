"""The runner of a step as one graph for each form of batch; what cannot be traced runs as it does without a graph."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.common._compat import storage_id
from shardlib.common.originals import CopiedModule, called_in
from shardlib.errors import BatchError, HandleError, IllegalComposition, RankMismatch
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.alive import order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.passes import optimise
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
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
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
        return "\n\n".join(map(described, self.graphs)) or "no graph yet: take a step"

    def train(self, call: Call, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._traceable and options.reached is not None:
            raise IllegalComposition(
                "compile=True does not tell which parameters were used: leave out optim.skip_unused"
            )
        if not self._traceable or self._first is None or self._first is call.microbatches:
            gradients = self._eager.train(call, totals, options)
            if self._first is None:
                self._first = call.microbatches
                self._try(call)
            return gradients
        self._first = ()
        if any(module.differs() for module in self._modules):  # a graph has the modules as they were
            self._graphs.clear()
            self._modules.clear()
        held: dict[str, torch.Tensor] = {}
        for index in range(len(call.microbatches)):
            outcome, gradients = self._microbatch(call, index, totals.buffers if index else call.buffers)
            held = {name: held[name].add_(new) if held else new for name, new in gradients.items()}
            totals.add(outcome)
        return held if len(call.microbatches) == 1 else self._function.reduced(held)

    def shared_aux(self, call: Call, aux: Any, sums: Any) -> Any:
        return aux

    def evaluate(self, params: Any, *args: Any) -> Any:
        return self._eager.evaluate(params, *args)

    def _microbatch(self, call: Call, index: int, buffers: Any) -> tuple[Outcome, dict[str, torch.Tensor]]:
        batch, key = call.microbatches[index], call.keys[index]
        traced = self._traced(call, index, buffers)
        stored = [call.params.buffers[bucket.name] for bucket in self._plan.buckets]
        start = call.loss_scale * (1.0 if traced.form.weighted else call.share)
        seed = torch.full((), start, dtype=torch.float64, device=self._mesh.device)
        tensors = [leaf for leaf in (*flatten(batch)[1], *flatten(buffers)[1]) if isinstance(leaf, torch.Tensor)]
        draws = [] if key is None else traced.stands.values(key)
        with torch.no_grad(), seeding_torch(key, self._mesh.device):
            outputs = traced.module(*stored, *tensors, seed, *draws)
        means, aux, after, gradients = traced.form.results(outputs)
        outcome = Outcome(means, traced.form.weighted, aux, after)
        names = [bucket.name for bucket in self._plan.trained]
        held = storages_of(call.params)
        outcome = detached(outcome, lambda tensor: storage_id(tensor.untyped_storage()) in held)
        return outcome, dict(zip(names, gradients, strict=True))

    def _traced(self, call: Call, index: int, buffers: Any) -> Traced:
        """The graph of a micro-batch of this form."""
        form = self._form(call, index, buffers)
        if form not in self._graphs:
            if len(self._graphs) >= MOST:
                raise BatchError(
                    f"compile=True: the {MOST + 1}th form of the loss's inputs, each of which takes a trace of its own. "
                    f"{_changing(form, self._graphs)}"
                )
            traced = self._optimised(self._trace(call, index, buffers))
            if self._order is not None and order_of(traced.graph) != self._order:
                raise HandleError(
                    "compile=True: with a batch of another form the loss exchanges in another order than at first, and ranks "
                    "whose batches differ would wait for each other. Let the order of layers not depend on the batch's sizes"
                )
            form = self._form(call, index, buffers)  # after the trace: a count of the loss's own calls goes on in it
            self._graphs[form] = traced
        return self._graphs[form]

    def _trace(self, call: Call, index: int, buffers: Any) -> Traced:
        plan, mesh, start = self._plan, self._mesh, time.perf_counter()
        traced, modules = called_in(
            lambda: trace(
                lambda blocks: Function(self._fn, plan, mesh, True, blocks),
                {bucket.name: call.params.buffers[bucket.name] for bucket in plan.buckets},
                call.microbatches[index],
                buffers if self._with_buffers else None,
                call.keys[index],
                len(call.microbatches) == 1,
                call.named(index, mesh),
            )
        )
        self._modules.update(modules)
        traced.seconds = time.perf_counter() - start
        return traced

    def _optimised(self, traced: Traced) -> Traced:
        start = time.perf_counter()
        optimise(traced, self._plan.step.remat, self._without)
        traced.seconds += time.perf_counter() - start
        return traced

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

    def _try(self, call: Call) -> None:
        """Trace the first micro-batch; all ranks have graphs of the same exchanges, or none has a graph. Collective."""
        why = ""
        try:
            traced = self._trace(call, 0, call.buffers)
        except Exception as error:
            why = str(error) if isinstance(error, IllegalComposition) else _told(error)
        else:
            self._graphs[self._form(call, 0, call.buffers)] = self._optimised(traced)
            self._order = order_of(traced.graph)
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

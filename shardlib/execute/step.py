"""One evaluation of a loss and its gradients over all micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.sums import Errors
from shardlib.errors import BatchError, HandleError, IllegalComposition, NonFiniteError, TreeError
from shardlib.exchange import Compression
from shardlib.execute.buffers import average_buffers
from shardlib.execute.copies import require_alike
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, Route, plain_route
from shardlib.execute.losses import (
    Outcome,
    add_means,
    is_compiled,
    map_means,
    means_of,
    needs,
    read_loss,
    require_gradient,
    require_same_batch,
    split_batch,
    wants,
)
from shardlib.execute.pipeline import Pipe
from shardlib.execute.sequence import require_whole_loss
from shardlib.functional import Mean
from shardlib.kernels.global_norm import sum_of_squares
from shardlib.mesh import Mesh
from shardlib.optim.own_exchange import OwnExchange
from shardlib.optim.shards import MeshShards, sum_over
from shardlib.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.sharded import Sharded
from shardlib.tree import Tree, leaves_of


@dataclass
class Evaluation:
    """A loss and its gradients.

    Attributes:
        loss: the mean over the global batch, 0-d.
        aux: what the loss function handed out beside it, or None.
        buffers: the buffers it returned, or None.
        grads: bucket name -> this rank's shard of the summed gradient, still to be multiplied by ``scale``.
        scale: what makes the sum the gradient of the mean loss (also undoes the loss scale); None for 1.
        norm: the gradient's global norm, 0-d, after ``scale``. Of gradients that are left unreduced, the root mean square of
            the norms of the ranks' own.
        finite: whether the loss and every gradient are finite, on every rank.
        shards: sums over the gradients' elements; knows their squares already.
        errors: what compressed exchanges have left out by now.
    """

    loss: torch.Tensor
    aux: Any
    buffers: Any
    grads: dict[str, torch.Tensor]
    scale: torch.Tensor | None
    norm: torch.Tensor
    finite: bool
    shards: MeshShards
    errors: Errors


class LossStep:
    """A loss function bound to a plan.

    Raises:
        HandleError: a compiled loss function with a plan that gathers parameters.
    """

    def __init__(self, loss_fn: Callable[..., Any], plan: Plan, mesh: Mesh, with_buffers: bool) -> None:
        self._loss_fn, self._plan, self._mesh, self._with_buffers = loss_fn, plan, mesh, with_buffers
        self._compression = Compression(plan.codecs, mesh)
        self._own = OwnExchange(plan, mesh) if plan.owned else None
        self._wants_rng = wants(loss_fn, "rng")
        self._met = False  # whether the ranks have compared batches and gradients, as they do once
        self._pipe: Pipe | None = None
        if plan.pipeline is not None:
            if with_buffers:
                raise IllegalComposition(
                    "pipeline does not bring buffers= from stage to stage; leave them out, or use accumulate() instead"
                )
            self._pipe = Pipe(loss_fn, plan, mesh, trained=True)
            return
        self.executor = Executor(plan, mesh, trained=True)
        if self.executor.gathers and is_compiled(loss_fn):
            raise HandleError(
                "the loss function is compiled as a whole, and ZeRO stage 3 gathers parameters inside it; compile the "
                "blocks instead (sl.block(torch.compile(fn))), or use zero(stage=2)"
            )
        if plan.styles and is_compiled(loss_fn):
            raise HandleError(
                "the loss function is compiled as a whole, and tensor slicing puts collectives between its operations; "
                "compile functions that use no sliced parameter"
            )

    def __call__(
        self,
        params: Sharded,
        batch: Tree,
        buffers: Any,
        rng: Key | None,
        loss_scale: float = 1.0,
        *,
        comm: dict[str, torch.Tensor],
        unreduced: tuple[str, ...] = (),
    ) -> Evaluation:
        """``comm``: the errors of compressed exchanges. ``unreduced``: axes over which gradients stay this rank's own."""
        plan, mesh = self._plan, self._mesh
        route = Route(self._compression, Errors(comm), unreduced)
        if rng is None and needs(self._loss_fn, "rng"):
            raise TreeError("the loss function has a parameter rng and none was given; pass rng=sl.Key(seed)")
        parts = split_batch(batch, plan, mesh)
        first, self._met = not self._met, True
        if first:
            require_same_batch(batch, plan, mesh)
        # The sums over micro-batches, and then over ranks, of losses and weights. Then what is summed over all ranks: the
        # gradient's squares, whether a rank strayed, and of a pipeline whether the loss is a `Mean` and whether it has
        # aux, which ranks without the loss cannot know.
        sums = torch.zeros(6 if self._pipe else 4, dtype=torch.float64, device=mesh.device)
        records = self._pipe.records if self._pipe else [self.executor.record]
        for record in records:
            record.strays.clear()
        run = self._one_by_one if self._pipe is None else self._through_stages
        grads, outcome = run(params, parts, buffers, rng, loss_scale, sums, route)
        if first and plan.styles:
            require_alike(grads, plan, mesh)
        shards = MeshShards(plan, mesh, unreduced, self._own, route.errors)
        sums[2] = shards.local_sum(sum_of_squares, grads)
        sums[3] = any(record.strays for record in records)
        sum_over(mesh, plan.loss_axes, sums)
        sum_over(mesh, tuple(axis for axis in mesh.shape if axis not in plan.loss_axes), sums[2:])
        if sums[3] > 0:
            for record in records:
                record.reconcile()
        total, weight, squares = sums[:3].unbind()
        shards.remember(sum_of_squares, grads, squares)
        weighted, aux = outcome.weighted, outcome.aux
        if self._pipe is not None:
            weighted = bool(sums[4] > 0)
            if not weighted:
                _require_even(parts)
            aux = self._pipe.hand_out(aux) if sums[5] > 0 else None
        scale = (1.0 / (weight * loss_scale)) if weighted else torch.full_like(total, 1.0 / loss_scale)
        scale = scale * math.prod(mesh.shape[axis] for axis in unreduced)  # a mean over them is to give the gradient
        return Evaluation(
            loss=total / weight,
            aux=reduce_means(aux, plan, mesh),
            buffers=average_buffers(outcome.buffers, plan, mesh),
            grads=grads,
            scale=None if not weighted and loss_scale == 1.0 and not unreduced else scale,
            norm=squares.sqrt() * scale,
            finite=bool(torch.isfinite(sums).all()),
            shards=shards,
            errors=route.errors,
        )

    def trace(self, params: Sharded, batch: Tree, buffers: Any, rng: Key) -> None:
        """Run the first micro-batch for the sake of the executor's record of touches alone."""
        part = split_batch(batch, self._plan, self._mesh)[0]
        self._microbatch(params, self.executor.gradients(plain_route(self._mesh)), part, 0, buffers, rng, 1.0)

    def _one_by_one(
        self,
        params: Sharded,
        parts: list[Tree],
        buffers: Any,
        rng: Key | None,
        loss_scale: float,
        sums: torch.Tensor,
        route: Route,
    ) -> tuple[dict[str, torch.Tensor], Outcome]:
        """Forward and backward of each micro-batch in turn: gradients, and the last one's outcome with means of all."""
        gradients = self.executor.gradients(route)
        outcome, aux = _NO_OUTCOME, None
        for index, part in enumerate(parts):
            outcome = self._microbatch(params, gradients, part, index, buffers, rng, loss_scale)
            buffers, aux = outcome.buffers, add_means(aux, outcome.aux)
            _add(sums, outcome)
        return gradients.result(), outcome._replace(aux=aux)

    def _through_stages(
        self,
        params: Sharded,
        parts: list[Tree],
        _: Any,
        rng: Key | None,
        loss_scale: float,
        sums: torch.Tensor,
        route: Route,
    ) -> tuple[dict[str, torch.Tensor], Outcome]:
        """All micro-batches through the pipeline: gradients, and where the loss is what `_one_by_one` gives."""
        plan, pipe = self._plan, self._pipe
        assert pipe is not None
        keys = self._keys(parts, rng)
        outcomes: dict[int, Outcome] = {}
        compute = pipe.computing(parts, keys)

        def run(stage: int, microbatch: int, tree: Tree, carry: Any) -> Any:
            key = keys[microbatch]
            with seeding_torch(key and key.fold_in(stage), self._mesh.device):
                result = compute(stage, microbatch, tree, carry)
            if not pipe.ends(stage):
                return result
            outcome = read_loss(result, False)
            require_gradient(outcome.total)
            outcomes[microbatch] = outcome._replace(total=outcome.total.detach())
            return outcome.total

        first = pipe.records[0].order is None
        grads = pipe.train(params, run, lambda microbatch: self._seed(outcomes[microbatch], loss_scale), route)
        if plan.sequence and first:  # after the schedule: now every stage may wait for the others
            done = {step for record in pipe.records for step in record.done}
            loss = (outcomes[0].total, outcomes[0].weight) if outcomes else None
            require_whole_loss(plan.sequence, self._mesh, done, loss, [pipe.axis])
        outcome, aux = _NO_OUTCOME, None
        for index in sorted(outcomes):
            outcome = outcomes[index]
            aux = add_means(aux, outcome.aux)
            _add(sums, outcome)
        if not outcomes:
            return grads, outcome
        outcome = outcome._replace(aux=aux)
        sums[4], sums[5] = float(outcome.weighted), float(outcome.aux is not None)
        return grads, outcome

    def _microbatch(
        self,
        params: Sharded,
        gradients: Gradients,
        batch: Tree,
        index: int,
        buffers: Any,
        rng: Key | None,
        loss_scale: float,
    ) -> Outcome:
        plan = self._plan
        extra: dict[str, Any] = {}
        key = rng and rng.at_slot(batch_index(plan, self._mesh) * plan.microbatches + index)
        if self._wants_rng and key is not None:
            extra["rng"] = key

        def run(tree: Tree) -> tuple[torch.Tensor, Outcome]:
            inputs = (tree, buffers, batch) if self._with_buffers else (tree, batch)
            with seeding_torch(key, self._mesh.device):
                outcome = read_loss(self._loss_fn(*inputs, **extra), self._with_buffers)
            require_gradient(outcome.total)
            record = self.executor.record
            if plan.sequence and record.order is None:
                require_whole_loss(plan.sequence, self._mesh, record.done, (outcome.total, outcome.weight))
            seed.fill_(self._seed(outcome, loss_scale))
            return outcome.total, outcome._replace(total=outcome.total.detach())

        seed = torch.ones((), dtype=torch.float64, device=self._mesh.device)
        return self.executor.backward(params, gradients, index == plan.microbatches - 1, run, seed)

    def _seed(self, outcome: Outcome, loss_scale: float) -> float:
        """A scalar's mean over ranks and micro-batches is known beforehand; a Mean's weight only afterwards."""
        plan = self._plan
        return loss_scale / (1 if outcome.weighted else plan.batch_ranks * plan.microbatches)

    def _keys(self, parts: list[Tree], rng: Key | None) -> list[Key | None]:
        """Each micro-batch's key. Its slot is its first row in the global batch, in units of its own rows."""
        if rng is None:
            return [None] * len(parts)
        rows = [_rows(part) for part in parts]
        first = batch_index(self._plan, self._mesh) * sum(rows)
        starts = [first + sum(rows[:index]) for index in range(len(rows))]
        return [rng.at_slot(Fraction(start, count)) for start, count in zip(starts, rows)]


_NO_OUTCOME = Outcome(torch.zeros(()), torch.zeros(()), False, None, None)


def _add(sums: torch.Tensor, outcome: Outcome) -> None:
    sums[0] += outcome.total.detach()
    sums[1] += outcome.weight


def _rows(batch: Tree) -> int:
    """Dimension 0 of a batch: that of its first tensor with dimensions."""
    return next((leaf.shape[0] for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _require_even(parts: list[Tree]) -> None:
    """Refuse micro-batches that a mean over each would weigh alike; where the ranks of all stages know what the loss is."""
    rows = [_rows(part) for part in parts]
    if len(set(rows)) > 1:
        raise BatchError(
            f"the batch's {sum(rows)} rows make {len(rows)} micro-batches of different sizes, and the loss is a mean over "
            "each; return sl.Mean(total, weight), or use a batch that divides"
        )


def batch_index(plan: Plan, mesh: Mesh) -> int:
    """This rank's number among the ranks that share the batch."""
    index = 0
    for axis in plan.batch_axes:
        index = index * mesh.shape[axis] + mesh.coords[axis]
    return index


def reduce_means(tree: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """Every `Mean` of a pytree as a number over all ranks' batches; other leaves stay this rank's own."""
    means = means_of(tree)
    if not means:
        return tree
    values = torch.stack([torch.as_tensor(value, dtype=torch.float64).detach() for mean in means for value in mean])
    sum_over(mesh, plan.batch_axes, values)
    results = iter(values.view(-1, 2).unbind())

    def quotient(_: Mean) -> torch.Tensor:
        total, weight = next(results)
        return total / weight

    return map_means(quotient, tree)


def first_bad_leaf(evaluation: Evaluation, plan: Plan, mesh: Mesh) -> str:
    """The path of the first leaf (in the plan's order, over all ranks) whose gradient is not finite, or ""."""
    order = {placement.path: number for number, placement in enumerate(plan.placements)}
    bad = []
    for bucket in plan.trained:
        parts = bucket.leaf_parts(evaluation.grads[bucket.name], bucket.levels)
        bad += [path for path, part in zip(bucket.paths, parts, strict=True) if not torch.isfinite(part).all()]
    everyone = [path for paths in primitives.all_gather_object(mesh, list(mesh.shape), bad) for path in paths]
    return min(everyone, key=order.__getitem__, default="")


def require_finite(evaluation: Evaluation, plan: Plan, mesh: Mesh, step: int) -> None:
    """Raise `NonFiniteError`, naming the step and the first leaf, on every rank alike."""
    path = first_bad_leaf(evaluation, plan, mesh)
    what = f"the gradient of {path}" if path else "the loss"
    raise NonFiniteError(
        f"step {step}: {what} is not finite (loss {evaluation.loss.item():g}). The state is unchanged. Lower the learning "
        "rate, clip gradients, or pass nonfinite='skip' to make_train_step to drop such steps"
    )

"""One evaluation of a loss and its gradients over all micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Residuals
from shardlib.errors import BatchError, IllegalComposition, LossError, NonFiniteError, TreeError, listing
from shardlib.execute.agreement import Inputs, Shares, require_alike
from shardlib.execute.batches import as_tensors, empty_leaves, rows_of, split_batch, writes_to
from shardlib.execute.buffers import BufferKinds
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.losses import (
    needs,
    quotients,
    require_function,
    require_no_buffers,
    sum_means,
    wants,
)
from shardlib.execute.stages.one import StepInputs, keys_of
from shardlib.execute.stages.pipe import Runner, runner_of
from shardlib.execute.totals import Sums, Totals, Weighing, alike
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.rng import Key, restore_generators, states_of_generators
from shardlib.sharded.given import require_no_graph
from shardlib.sharded.gradient_offload import GradientOffload
from shardlib.sharded.params_on_disk import Reads
from shardlib.sharded.reduction import BoundCodecs
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tree_map


@dataclass
class Evaluation:
    """A loss and its gradients.

    Attributes:
        loss: the mean over the global batch, 0-d; 0 if the batch has weight 0.
        weight: the weight by which the loss was divided, a number on the host; 1 for a sum of means, each of which was
            divided by its own. If it is 0 the gradient is 0 as well.
        losses: total and weight of each mean of each micro-batch on this rank.
        aux: what the loss function returned besides the loss, or None.
        buffers: the returned buffers, or None.
        grads: bucket name -> this rank's shard of the summed gradient, not yet multiplied by ``scale``.
        scale: the factor from the sum to the gradient of the mean loss, without the loss scale; None for 1. A number on the
            host.
        norm: the gradient's global norm, 0-d, after ``scale``. If gradients are left unreduced, the root mean square of
            the norms of the ranks' gradients.
        finite: whether the loss, its weight and every gradient, before and after ``scale``, are finite on every rank.
        squares: Σ of the squares of ``grads``, over all ranks, a number on the host.
        residuals: residuals of compressed exchanges, those of this step included.
        landing: tells when ``grads`` have come to the optimizer's memory.
        layer_tokens: tokens of the global batch that layers saw, summed over layers; None where nothing is left out.
        empty: what this rank's batch is, if it has no rows: see `empty_leaves`.
        used: the paths of the parameters that any rank used; None if ``reached`` was not given.
    """

    loss: torch.Tensor
    weight: float
    losses: Sequence[Mean]
    aux: Any
    buffers: Any
    grads: Mapping[str, torch.Tensor]
    scale: float | None
    norm: torch.Tensor
    finite: bool
    squares: float
    residuals: Residuals
    landing: GradientOffload
    layer_tokens: int | None
    empty: str
    used: frozenset[str] | None


class LossStep:
    """A loss function bound to a plan.

    Args:
        kinds: those of its buffers; see `BufferKinds`.
        run_by: makes what runs its micro-batches.

    Attributes:
        runner: what does.

    Raises:
        LossError: a loss function that is a module, or not callable.
        TypeError: it takes buffers, and there are none.
        HandleError: a compiled loss function with a plan that gathers parameters.
        IllegalComposition: buffers on a plan whose bits must not depend on the mesh.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        with_buffers: bool,
        kinds: Mapping[str, str] | None = None,
        run_by: Callable[..., Runner] = runner_of,
    ) -> None:
        require_function(loss_fn, "the loss function", "params, buffers, batch" if with_buffers else "params, batch")
        if not with_buffers:
            require_no_buffers(loss_fn, "give them by buffers=")
        if with_buffers and plan.step.tree:
            raise IllegalComposition(
                "reproducible() does not go together with buffers=. Use layers without them (LayerNorm)"
            )
        self._loss_fn, self._plan, self._mesh, self._kinds = loss_fn, plan, mesh, BufferKinds(kinds)
        self._codecs = BoundCodecs(mesh)
        self.runner: Runner = run_by(loss_fn, plan, mesh, trained=True, with_buffers=with_buffers)
        self._inputs = Inputs(plan, mesh)
        self._shares = Shares(plan, mesh, draws=plan.step.has_drops or wants(loss_fn, "rng"))
        self._weight: float | None = None  # of the last batch, if losses had weights
        self._terms = 1  # means in the last batch's losses
        self._last_weights: torch.Tensor | None = None  # of the means in the last batch's losses, if they are a sum
        self._weights: torch.Tensor | None = None  # the same, where the batch before had them too
        self._compared = False  # whether ranks with copies of parameters have compared gradients, as they do once
        # A scalar loss is divided by a power of two before backward, since that does not round 16-bit losses, and by the rest
        # when the sum is complete. With residuals it is divided by the exact number of shares before backward, so that they
        # are of the mean's gradient and remain valid for any number of ranks.
        shares = plan.batch_ranks * plan.step.microbatches
        divides = any(channel.keeps for channel in plan.channels if not channel.mean)
        power = shares if divides else 2 ** math.ceil(math.log2(shares))
        self._share, self._rest = 1 / power, power / shares
        computed = [torch.promote_types(bucket.reduce_dtype, torch.float32) for bucket in plan.trained]
        self._largest = min((torch.finfo(dtype).max for dtype in computed), default=math.inf)

    def __call__(
        self,
        params: Sharded,
        batch: Tree,
        buffers: Any,
        rng: Key | None,
        loss_scale: float = 1.0,
        *,
        step: int | None = None,
        comm: dict[str, torch.Tensor],
        unreduced: tuple[str, ...] = (),
        reached: set[str] | None = None,
        equal: Mapping[str, Any],
        land: Callable[[], GradientOffload] | None = None,
    ) -> Evaluation:
        """Evaluate the loss and its gradients. Collective.

        Args:
            step: the step's number, by which a plan leaves out layers; ``rng`` is the key of this step.
            comm: residuals of compressed exchanges.
            unreduced: see `ReductionOptions`.
            reached: see `ReductionOptions`.
            equal: name -> value that must be equal on all ranks.
            land: makes the landing of the gradients; without it they land in memory of their own.
        """
        plan, mesh = self._plan, self._mesh
        if rng is None and needs(self._loss_fn, "rng"):
            raise TreeError("the loss function has a parameter rng and none was given; pass rng=sl.Key(seed)")
        if plan.step.has_drops and (step is None or rng is None):
            raise TreeError(
                "what this plan leaves out depends on the step: pass step= and rng=sl.Key(seed).fold_in(step)"
            )
        batch = as_tensors(batch, mesh.device)
        require_no_graph(f"rank {mesh.rank}'s batch", batch, BatchError)
        microbatches = split_batch(batch, plan, mesh)
        share, reads = self._inputs.share(batch, equal), Reads(params.mesh, params.on_disk)
        records = self.runner.records
        for record in records:
            record.strayed = False  # of a step that raised
        rows = sum(map(rows_of, microbatches))

        def called(first: int | None) -> StepInputs:
            keys = keys_of(plan, mesh, microbatches, rng, first)
            drops = [plan.step.drops(step, key) for key in keys]
            given = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, buffers)
            weighing = Weighing(plan, mesh, self._terms, self._weights)
            return StepInputs(params, microbatches, keys, drops, given, loss_scale, self._share, weighing)

        call = called(self._shares.first(rows))
        share += self._shares.number(rows)
        draws, before = states_of_generators(mesh.device), writes_to(batch)
        while True:
            for record in records:
                record.layer_tokens = 0
            landing = GradientOffload(plan, mesh, unreduced) if land is None else land()
            # New residuals are kept beside those in `comm`, so that the step can be repeated.
            options = ReductionOptions(self._codecs, Residuals(comm), unreduced, reached, landing)
            totals = Totals(plan, mesh)
            grads = landing.complete(self.runner.train(call, totals, options))
            landing.settle()
            strayed = any(record.strayed for record in records)
            totals.layer_tokens = sum(record.layer_tokens for record in records)
            sums = totals.over_ranks(landing.squares(), share + strayed + reads.failed, reached)
            if not sums.differ:
                totals.require_agreement()
                if call.weighing.fits(sums.weights):
                    break
            landing.wait_for_all()
            if sums.differ:
                reads.explain(list(mesh.shape))
                self._inputs.explain()
                call = called(self._shares.exchanged(rows))
                share = 0.0  # the inputs agree, so a rank left the trace, or ranks have different numbers of rows
                for record in records:
                    record.distrust()
            if written := [path for path, writes in writes_to(batch).items() if writes != before[path]]:
                raise LossError(
                    f"the loss function writes to its batch in place ({', '.join(written)}), and this step is to be computed "
                    "again, as ranks use other parameters, rows or weights than in the step before: write to a copy, "
                    "x = x.clone()"
                )
            restore_generators(draws)
            if reached is not None:
                reached.clear()
        self._note_weights(sums)
        if not self._compared:
            require_alike(grads, landing, totals.losses, plan, mesh)
            self._compared = True
        aux = self.runner.shared_aux(call, totals.aux, sums)
        self._weight = sums.numbers[1] if sums.weighted else None
        scale = self._scale(self._weight, loss_scale, unreduced)
        loss, norm, finite = self._mean(sums, 1.0 if scale is None else scale)
        return Evaluation(
            loss=loss,
            weight=sums.numbers[1],
            losses=totals.losses,
            aux=quotients(sum_means(aux, plan, mesh)),
            buffers=self._kinds.after_step(totals.buffers, plan, mesh),
            grads=grads,
            scale=scale,
            norm=norm,
            finite=finite,
            squares=sums.numbers[2],
            residuals=options.residuals,
            landing=landing,
            layer_tokens=sums.layer_tokens if plan.step.has_drops else None,
            empty=empty_leaves(batch),
            used=sums.used,
        )

    def _note_weights(self, sums: Sums) -> None:
        """Note what the next step may expect of a sum of means."""
        steady = self._plan.step.microbatches > 1 and alike(self._last_weights, sums.weights)
        self._weights = sums.weights if steady else None
        self._terms, self._last_weights = 1 if sums.weights is None else len(sums.weights), sums.weights

    def expected_scale(self, loss_scale: float) -> float | None:
        """The `Evaluation.scale` of the next call, if its losses' weights sum to what the last one's did."""
        return self._scale(self._weight, loss_scale, ())

    def _scale(self, weight: float | None, loss_scale: float, unreduced: tuple[str, ...]) -> float | None:
        """`Evaluation.scale`, from the weight by which the loss is divided, if losses have weights."""
        if weight is None and loss_scale == 1.0 and self._rest == 1.0 and not unreduced:
            return None
        if weight == 0:
            return 0.0
        # Gradients that are left unreduced are averaged by the optimizer.
        ranks = math.prod(self._mesh.shape[axis] for axis in unreduced)
        return ranks * (self._rest / loss_scale if weight is None else 1.0 / (weight * loss_scale))

    def _mean(self, sums: Sums, scale: float) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The loss, the gradient's norm, and whether all are finite: see `Evaluation`."""
        total, weight, squares = sums.numbers
        if weight == 0:
            nothing = torch.zeros_like(sums.total)
            return nothing, nothing, True
        if scale > self._largest:
            raise LossError(
                f"the weights of sl.Mean sum to {weight:g}, and gradients times {scale:g} overflow. Scale total and "
                "weight alike"
            )
        finite = all(map(math.isfinite, (weight, total / weight))) and math.sqrt(squares) * scale <= self._largest
        return sums.total / sums.weight, sums.squares.sqrt() * scale, finite


def first_bad_leaf(evaluation: Evaluation, plan: Plan, mesh: Mesh) -> str:
    """The path of the first leaf, in the plan's order, whose gradient is not finite on any rank; "" if all are finite."""
    order = {placement.path: number for number, placement in enumerate(plan.placements)}

    def examine() -> list[str]:
        bad = []
        for bucket in evaluation.landing.suspects:  # others need not be read from disk
            grads = bucket.leaf_segments(evaluation.grads[bucket.name], bucket.levels)
            bad += [path for path, grad in zip(bucket.paths, grads, strict=True) if not torch.isfinite(grad).all()]
        return bad

    bad = evaluation.landing.examined(examine)
    everyone = [path for paths in primitives.all_gather_object(mesh, list(mesh.shape), bad) for path in paths]
    return min(everyone, key=order.__getitem__, default="")


def require_usable(evaluation: Evaluation, plan: Plan, mesh: Mesh, step: int) -> None:
    """Refuse an evaluation from which no update can be made. Collective.

    Raises:
        BatchError: the loss is not finite on a rank whose batch has no rows; names its leaves.
        NonFiniteError: loss, weight or gradient are not finite; names the step and the first leaf.
        LossError: the batch has weight 0.
    """
    if not evaluation.finite:
        weights = [weight for total, weight in evaluation.losses if not total.isfinite()]
        hollow, empty = 0 in weights, evaluation.empty if weights else ""
        of_ranks = primitives.all_gather_object(mesh, list(mesh.shape), (hollow, empty))
        if nothing := [f"rank {rank}: {empty}" for rank, (_, empty) in enumerate(of_ranks) if empty]:
            raise BatchError(
                f"step {step}: batches without rows, whose loss is not finite:\n{listing(nothing)}\nThe state is "
                "unchanged. Leave them out, or return sl.Mean of sums"
            )
        path = first_bad_leaf(evaluation, plan, mesh)
        norm, weight = evaluation.norm.item(), evaluation.weight
        why = ""
        if any(hollow for hollow, _ in of_ranks):
            why = " The total of a sl.Mean of weight 0 is not finite: take a sum (reduction='sum')."
        if path:
            what = f"the gradient of {path}"
        elif not math.isfinite(weight):
            what = f"the weight of sl.Mean ({weight:g})"
        else:
            what = "the loss" if not evaluation.loss.isfinite() else f"the gradient's norm ({norm:g}, in its dtype)"
        raise NonFiniteError(
            f"step {step}: {what} is not finite (loss {evaluation.loss.item():g}).{why} The state is unchanged. Lower "
            "the learning rate, clip, or pass make_train_step(nonfinite='skip')"
        )
    if evaluation.weight == 0:
        raise LossError(
            f"step {step}: the weights of sl.Mean are 0 on all ranks. The state is unchanged. Leave out such batches, "
            "or pass make_train_step(nonfinite='skip')"
        )

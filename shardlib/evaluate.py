"""Evaluation and sampling on sharded parameters, without gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, overload

import optree
import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.common.boundaries import untransformed
from shardlib.errors import BatchError, LossError, TreeError, axes_named, listing
from shardlib.execute.agreement import Agreement, Inputs, agree, taken_together
from shardlib.execute.batches import arriving
from shardlib.execute.losses import Results, is_mean, means, quotients, require_function, sum_means
from shardlib.execute.stages.pipe import runner_of
from shardlib.execute.values.around import Around
from shardlib.nn.blocks import evaluating
from shardlib.nn.functional import Mean
from shardlib.sharded.given import given_params, require_order
from shardlib.sharded.params_on_disk import Reads
from shardlib.sharded.tree import Sharded
from shardlib.sharding import Lifting
from shardlib.tree import path_name

R = TypeVar("R", covariant=True)  # what the function returns, with numbers for means


class EvalStep(Generic[R]):
    """A function bound to a plan and a mesh; see `make_eval_step`."""

    def __init__(self, fn: Callable[..., Any], params: Any) -> None:
        require_function(fn, "what is evaluated", "params, ...")
        self._lifting = Lifting()
        params = given_params("make_eval_step", params)
        self._sharded = isinstance(params, Sharded)
        lifted = self._lifting(params)
        self._plan, self._mesh = lifted.plan, lifted.mesh
        self._together = taken_together(lifted.plan)
        self._inputs = Inputs(lifted.plan, lifted.mesh, self._together)
        self._runner = runner_of(fn, lifted.plan, lifted.mesh, trained=False)
        self._fn = fn

    def _around(self, params: Any, *args: Any) -> Any:
        """A call inside a transform of torch.func, or forward mode."""
        params = given_params("an eval step", params)
        with evaluating():
            if not isinstance(params, Sharded):
                return quotients(self._fn(params, *args))
            return Around(self._fn, params.plan, params.mesh, "an eval step", trained=False).evaluate(params, args)

    @untransformed("an eval step", _around)
    def __call__(self, params: Any, *args: Any) -> R:
        """The function's result for one batch, with each `Mean` as a number over all ranks' batches.

        Raises:
            LossError: ranks have means at different paths, or all means have weight 0.
            RankMismatch: ranks along axes over which the batch does not vary were given different arguments.
        """
        current, results = self._current(params, *args), self._results()
        if self._inputs.axes:
            self._divided(True, self._together, self._inputs.share(args, {}))
        reads = Reads(current.mesh, current.on_disk)
        results.add(self._run(current, *args))
        return self._reduced(results, reads)

    @untransformed("an eval step's over()")
    def over(self, params: Any, batches: Iterable[Any]) -> R:
        """The function's means over several batches. Totals and weights are summed over batches first, then over ranks once.

        Each batch is the function's second argument. Ranks that communicate inside the function (parameters are gathered,
        sliced or in stages, sequences are cut) must have equally many batches, and agree before each batch whether there is
        another. Other ranks may have different numbers of batches, at least one each.

        Raises:
            LossError: a rank without batches, or results other than a `Mean`, which are listed; or as in a call.
            BatchError: some ranks have more batches than others; names them, on all ranks.
            RankMismatch: as in a call.
        """
        current, results = self._current(params, batches), self._results()
        rest, reads = iter(batches), Reads(current.mesh, current.on_disk)
        for taken in itertools.count():
            if not self._agreed(batch := next(rest, _NONE), taken):
                break
            result = self._run(current, batch)
            if results.tree is None:
                _require_means(result)
            results.add(result)
        if results.tree is None and not results.faults:
            results.faults.append("evaluation over no batches has no mean; give each rank at least one")
        return self._reduced(results, reads)

    def _results(self) -> Results:
        return Results(self._mesh.device, self._plan.reductions.summation, "batch", "the result")

    def _reduced(self, results: Results, reads: Reads) -> Any:
        """The results with each `Mean` as a number over all ranks. Without means, collective over ranks that take batches
        together at most."""
        if not results.paths and not results.faults:
            reads.require(self._together)
            return results.tree
        plan, mesh = self._plan, self._mesh
        agreement = Agreement(results.form if results.paths else None, tuple(results.faults))
        sums = torch.tensor([reads.failed, *agreement.numbers()], dtype=torch.float64, device=mesh.device)
        sum_over(mesh, tuple(mesh.shape), sums)
        unread, *numbers = sums.tolist()
        if unread:
            reads.explain(list(mesh.shape))
        if not agree(numbers):
            agreement.refuse(
                mesh, "Return the same sl.Mean on every rank, sl.Mean(0, 0) where there is nothing to count."
            )
        summed = sum_means(results.tree, plan, mesh)
        if all(mean.weight == 0 for mean in means(summed).values()):
            of = ", ".join(repr(path) if path else "the result" for path in results.paths)
            raise LossError(
                f"{of}: weight 0 on all ranks, so there is no mean; leave such batches out, or take several together by "
                "eval_step.over(params, batches)"
            )
        return quotients(summed)

    def _agreed(self, batch: Any, taken: int) -> bool:
        """Whether there is another batch. Raises if only some of the ranks that take batches together have one."""
        mesh, has_batch = self._mesh, batch is not _NONE
        if taken == 0:
            without, having = self._divided(has_batch, tuple(mesh.shape), 0.0)
            if having:
                raise LossError(
                    f"rank {without}: evaluation over no batches has no mean; give each rank at least one, as rank {having} "
                    "has"
                )
        without, having = self._divided(has_batch, self._together, self._inputs.share(batch, {}) if has_batch else 0.0)
        if having:
            raise BatchError(
                f"after {taken} batches rank {without} has no other to evaluate and rank {having} has: ranks along "
                f"{axes_named(self._together)} take each batch together, so give them equally many"
            )
        return has_batch

    def _divided(self, has_batch: bool, axes: tuple[str, ...], share: float) -> tuple[str, str]:
        """The ranks along ``axes`` without a batch and those with one, as text; two empty strings if all ranks are alike.

        Args:
            share: `Inputs.share` of the batch. Raises on all ranks if the inputs do not agree.
        """
        mesh = self._mesh
        ranks = math.prod(mesh.shape[axis] for axis in axes)
        if ranks == 1:
            return "", ""
        sums = torch.tensor([has_batch, share], dtype=torch.float64, device=mesh.device)
        sum_over(mesh, axes, sums)
        count, differ = sums.tolist()
        if 0 < count < ranks:
            everyone = primitives.all_gather_object(mesh, axes, (mesh.rank, has_batch))
            without, having = (
                ", ".join(str(rank) for rank, has in everyone if has is wanted) for wanted in (False, True)
            )
            return without, having
        if differ:
            self._inputs.explain()
        return "", ""

    def _run(self, params: Sharded, *args: Any) -> Any:
        with evaluating():
            return self._runner.evaluate(params, *(arriving(arg, self._plan, self._mesh) for arg in args))

    def _current(self, params: Any, *others: Any) -> Sharded:
        if self._sharded:
            require_order("an eval step", "params, ...", params, *others)
        current = self._lifting(given_params("an eval step", params))
        if current.plan is not self._plan and current.plan.layout != self._plan.layout:
            raise TreeError(
                "these parameters were sharded by another plan than the eval step was made for; make one for it"
            )
        return current


_NONE = object()  # stands for "no batch"; None may be a batch


@overload
def make_eval_step(fn: Callable[..., Mean], params: Any) -> EvalStep[torch.Tensor]: ...
@overload
def make_eval_step(fn: Callable[..., dict[str, Mean]], params: Any) -> EvalStep[dict[str, torch.Tensor]]: ...
@overload
def make_eval_step(fn: Callable[..., R], params: Any) -> EvalStep[R]: ...
def make_eval_step(fn: Callable[..., Any], params: Any) -> EvalStep[Any]:
    """Make ``eval_step(params, *args)``, which runs ``fn`` on sharded parameters without gradients.

    Modules of `from_module` run in eval mode (without dropout, say), unless ``fn`` calls ``apply(..., training=True)``.

    Every `Mean` that ``fn`` returns, alone or in a pytree, becomes one number over all ranks' batches (NaN for a weight of 0,
    unless all weights are 0, which is an error); other results (samples, logits) are this rank's, and parameters among them
    are whole copies. ``eval_step.over(params, batches)`` gives means over several batches. ``params`` may also be a
    `TrainState`. NumPy arrays among the arguments become tensors, and under `sl.precision` floating tensors are cast, as in
    a batch.

    With several stages ``fn`` is an `sl.sequential`, called with one batch. The batch passes the stages as a whole, not in
    micro-batches: each stage waits for the one before it. The ranks of all stages get the result of the last block.

    >>> params = {"w": torch.ones(4, 4)}
    >>> evaluate = sl.make_eval_step(lambda params, x: sl.Mean((x @ params["w"]).sum(), x.numel()), params)
    >>> float(evaluate(params, torch.ones(2, 4)))
    4.0
    >>> float(evaluate.over(params, [torch.ones(2, 4), torch.zeros(2, 4)]))
    2.0
    """
    return EvalStep(fn, params)


def _require_means(result: Any) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(result, is_leaf=is_mean)
    wrong = [
        f"{path_name(path) or 'result'}: {type(leaf).__name__}"
        for path, leaf in zip(paths, leaves)
        if not is_mean(leaf)
    ]
    if wrong or not leaves:
        raise LossError(
            f"over batches only sl.Mean(total, weight) adds up, and the function returned\n{listing(wrong or ['nothing'])}\n"
            "Return means alone, or call the eval step batch by batch."
        )

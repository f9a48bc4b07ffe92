"""Evaluation and sampling on sharded parameters, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from shardlib.errors import LossError, TreeError, listing
from shardlib.execute.agreement import Agreement, agree
from shardlib.execute.batches import arriving
from shardlib.execute.executor import Executor
from shardlib.execute.losses import require_function
from shardlib.execute.means import Results, is_mean, means, quotients, sum_means
from shardlib.execute.pipeline import Pipe
from shardlib.optim.shards import sum_over
from shardlib.sharded import Sharded
from shardlib.train import TrainState, lift
from shardlib.tree import path_name


class EvalStep:
    """A function bound to how parameters are sharded; see `make_eval_step`."""

    def __init__(self, fn: Callable[..., Any], params: Any) -> None:
        require_function(fn, "what is evaluated", "params, ...")
        lifted = lift(params)
        self._plan, self._mesh = lifted.plan, lifted.mesh
        if lifted.plan.pipeline is None:
            executor = Executor(lifted.plan, lifted.mesh, trained=False)

            def forward(params: Sharded, *args: Any) -> Any:
                return executor.forward(params, lambda tree: fn(tree, *args))

            self._forward: Callable[..., Any] = forward
        else:
            self._forward = Pipe(fn, lifted.plan, lifted.mesh, trained=False).evaluate

    def __call__(self, params: Any, *args: Any) -> Any:
        """What the function returns for one batch, each `Mean` as a number over all ranks' batches.

        Raises:
            LossError: means at other places than other ranks', or none that weighs.
        """
        results = self._results()
        results.add(self._run(self._current(params), *args))
        return self._reduced(results)

    def over(self, params: Any, batches: Iterable[Any]) -> Any:
        """The same over several batches: sums and weights add up over them first, on the device, and over ranks once.

        Each batch is the function's second argument. Where parameters are gathered or sliced, ranks take equally many.

        Raises:
            LossError: no batches, or results that are not a `Mean`; lists them. Else as a call.
        """
        current, results = self._current(params), self._results()
        for batch in batches:
            part = self._run(current, batch)
            if results.tree is None:
                _require_means(part)
            results.add(part)
        if results.tree is None and not results.faults:
            results.faults.append("evaluation over no batches has no mean; give each rank at least one")
        return self._reduced(results)

    def _results(self) -> Results:
        return Results(self._mesh.device, "batch", "the result")

    def _reduced(self, results: Results) -> Any:
        """Over ranks; those that have no means to share wait for nobody."""
        if not results.paths and not results.faults:
            return results.tree
        plan, mesh = self._plan, self._mesh
        mine = Agreement(results.form if results.paths else None, tuple(results.faults))
        told = torch.tensor(mine.numbers(), dtype=torch.float64, device=mesh.device)
        sum_over(mesh, tuple(mesh.shape), told)
        if not agree(told.tolist()):
            mine.refuse(mesh, "Return the same sl.Mean on every rank, sl.Mean(0, 0) where there is nothing to count.")
        summed = sum_means(results.tree, plan, mesh)
        if all(mean.weight == 0 for mean in means(summed).values()):
            raise LossError(
                f"nothing weighs in {', '.join(map(repr, results.paths))} on any rank, so there is no mean; leave such "
                "batches out, or take several together by eval_step.over(params, batches)"
            )
        return quotients(summed)

    def _run(self, params: Sharded, *args: Any) -> Any:
        return self._forward(params, *(arriving(arg, self._plan, self._mesh) for arg in args))

    def _current(self, params: Any) -> Sharded:
        current = lift(params.params if isinstance(params, TrainState) else params)
        if current.plan is not self._plan and current.plan.layout != self._plan.layout:
            raise TreeError(
                "these parameters were sharded by another plan than the eval step was made for; make one for it"
            )
        return current


def make_eval_step(fn: Callable[..., Any], params: Any) -> EvalStep:
    """``eval_step(params, *args)``: ``fn`` on sharded parameters, without gradients.

    Every `Mean` that ``fn`` returns, in a dictionary say, becomes one number over all ranks' batches (NaN where it weighs
    nothing and others do); other results (samples, logits) are this rank's own, parameters among them whole copies.
    ``eval_step.over(params, batches)`` gives means over several batches. ``params`` may also be a `TrainState`. NumPy's
    arrays among the arguments become tensors, and under `sl.precision` floating tensors are cast, as in a batch.

    Under a pipeline ``fn`` is an `sl.sequential`, called with one batch. That goes through in one piece, not in
    micro-batches: each stage waits for the one before it. What the last block returns is handed to the ranks of all stages.
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

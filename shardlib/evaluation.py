"""Evaluation and sampling on sharded parameters, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import optree

from shardlib.errors import LossError, TreeError, listing
from shardlib.execute.executor import Executor
from shardlib.execute.losses import add_means, cast, is_mean, require_function
from shardlib.execute.pipeline import Pipe
from shardlib.execute.step import reduce_means
from shardlib.sharded import Sharded
from shardlib.train import TrainState, lift
from shardlib.tree import path_name, tree_map


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
        """What the function returns for one batch, each `Mean` as a number over all ranks' batches."""
        return reduce_means(self._run(self._current(params), *args), self._plan, self._mesh)

    def over(self, params: Any, batches: Iterable[Any]) -> Any:
        """The same over several batches: sums and weights add up over them first, on the device, and over ranks once.

        Each batch is the function's second argument. Where parameters are gathered or sliced, ranks take equally many.

        Raises:
            LossError: no batches, or results that are not a `Mean`; lists them.
        """
        current, total = self._current(params), None
        for number, batch in enumerate(batches):
            part = self._run(current, batch)
            if number == 0:
                _require_means(part)
            total = add_means(total, part)
        if total is None:
            raise LossError("evaluation over no batches has no mean; give each rank at least one")
        return reduce_means(total, self._plan, self._mesh)

    def _run(self, params: Sharded, *args: Any) -> Any:
        return self._forward(params, *(tree_map(partial(cast, plan=self._plan), arg) for arg in args))

    def _current(self, params: Any) -> Sharded:
        current = lift(params.params if isinstance(params, TrainState) else params)
        if current.plan is not self._plan and current.plan.layout != self._plan.layout:
            raise TreeError(
                "these parameters were sharded by another plan than the eval step was made for; make one for it"
            )
        return current


def make_eval_step(fn: Callable[..., Any], params: Any) -> EvalStep:
    """``eval_step(params, *args)``: ``fn`` on sharded parameters, without gradients.

    Every `Mean` that ``fn`` returns, in a dictionary say, becomes one number over all ranks' batches; other results
    (samples, logits) are this rank's own. ``eval_step.over(params, batches)`` gives means over several batches.
    ``params`` may also be a `TrainState`. Under `sl.precision` floating tensors among the arguments are cast, as a batch is.

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

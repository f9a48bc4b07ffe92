"""Evaluation and sampling on sharded parameters, without gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.errors import BatchError, LossError, TreeError, axes_named, listing
from shardlib.execute.agreement import Agreement, agree
from shardlib.execute.batches import arriving
from shardlib.execute.inputs import Inputs
from shardlib.execute.losses import require_function
from shardlib.execute.means import Results, is_mean, means, quotients, sum_means
from shardlib.execute.stages.runner import runner_of
from shardlib.optim.train_state import TrainState
from shardlib.plan.plan import Plan
from shardlib.sharded.shard import lift
from shardlib.sharded.tree import Sharded
from shardlib.tree import path_name


class EvalStep:
    """A function bound to how parameters are sharded; see `make_eval_step`."""

    def __init__(self, fn: Callable[..., Any], params: Any) -> None:
        require_function(fn, "what is evaluated", "params, ...")
        lifted = lift(params)
        self._plan, self._mesh = lifted.plan, lifted.mesh
        self._together = _together(lifted.plan)
        self._inputs = Inputs(lifted.plan, lifted.mesh, self._together)
        self._runner = runner_of(fn, lifted.plan, lifted.mesh, trained=False)

    def __call__(self, params: Any, *args: Any) -> Any:
        """What the function returns for one batch, each `Mean` as a number over all ranks' batches.

        Raises:
            LossError: means at other places than other ranks', or none that weighs.
            RankMismatch: ranks along axes that do not share the batch out were given different arguments.
        """
        current, results = self._current(params), self._results()
        if self._inputs.axes:
            self._divided(True, self._together, self._inputs.share(args, {}))
        results.add(self._run(current, *args))
        return self._reduced(results)

    def over(self, params: Any, batches: Iterable[Any]) -> Any:
        """The same over several batches: sums and weights add up over them first, on the device, and over ranks once.

        Each batch is the function's second argument. Where the function sends anything (parameters are gathered, sliced
        or in stages, sequences are cut) the ranks that take part must take equally many, and tell each other before each
        batch whether they have another. Elsewhere they may take unequally many, but each at least one.

        Raises:
            LossError: no batches on a rank, or results that are not a `Mean`; lists them. Else as a call.
            BatchError: ranks with more batches than others; names them, on all ranks.
            RankMismatch: as a call.
        """
        current, results = self._current(params), self._results()
        rest = iter(batches)
        for taken in itertools.count():
            if not self._agreed(batch := next(rest, _NONE), taken):
                break
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

    def _agreed(self, batch: Any, taken: int) -> bool:
        """Whether there is another batch, as all ranks say that take the next one together."""
        mesh, there = self._mesh, batch is not _NONE
        if taken == 0:
            few, more = self._divided(there, tuple(mesh.shape), 0.0)
            if more:
                raise LossError(
                    f"rank {few}: evaluation over no batches has no mean; give each rank at least one, as rank {more} has"
                )
        few, more = self._divided(there, self._together, self._inputs.share(batch, {}) if there else 0.0)
        if more:
            raise BatchError(
                f"after {taken} batches rank {few} has no other to evaluate and rank {more} has: ranks along "
                f"{axes_named(self._together)} take each batch together, so give them equally many"
            )
        return there

    def _divided(self, there: bool, axes: tuple[str, ...], share: float) -> tuple[str, str]:
        """Where only some ranks along the axes have a batch, those that have none and those that have one; else nobody.

        ``share``: as `Inputs.share` gives it; all ranks are told here if these do not agree.
        """
        mesh = self._mesh
        ranks = math.prod(mesh.shape[axis] for axis in axes)
        if ranks == 1:
            return "", ""
        told = torch.tensor([there, share], dtype=torch.float64, device=mesh.device)
        sum_over(mesh, axes, told)
        count, differ = told.tolist()
        if 0 < count < ranks:
            everyone = primitives.all_gather_object(mesh, axes, (mesh.rank, there))
            few, more = (", ".join(str(rank) for rank, found in everyone if found is had) for had in (False, True))
            return few, more
        if differ:
            self._inputs.explain()
        return "", ""

    def _run(self, params: Sharded, *args: Any) -> Any:
        return self._runner.evaluate(params, *(arriving(arg, self._plan, self._mesh) for arg in args))

    def _current(self, params: Any) -> Sharded:
        current = lift(params.params if isinstance(params, TrainState) else params)
        if current.plan is not self._plan and current.plan.layout != self._plan.layout:
            raise TreeError(
                "these parameters were sharded by another plan than the eval step was made for; make one for it"
            )
        return current


_NONE = object()  # where there is no other batch; None may be one


def _together(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks evaluate each batch together: they share it, or gather parameters from each other."""
    gathered = {axis for bucket in plan.everywhere.buckets for axis in bucket.axes[: bucket.param_level]}
    return tuple(
        axis for axis, size in plan.sizes.items() if size > 1 and (axis in gathered or axis not in plan.batch_axes)
    )


def make_eval_step(fn: Callable[..., Any], params: Any) -> EvalStep:
    """``eval_step(params, *args)``: ``fn`` on sharded parameters, without gradients.

    Every `Mean` that ``fn`` returns, in a dictionary say, becomes one number over all ranks' batches (NaN where it weighs
    nothing and others do); other results (samples, logits) are this rank's own, parameters among them whole copies.
    ``eval_step.over(params, batches)`` gives means over several batches. ``params`` may also be a `TrainState`. NumPy's
    arrays among the arguments become tensors, and under `sl.precision` floating tensors are cast, as in a batch.

    Under a pipeline ``fn`` is an `sl.sequential`, called with one batch. That goes through in one piece, not in
    micro-batches: each stage waits for the one before it. What the last block returns is handed to the ranks of all stages.

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

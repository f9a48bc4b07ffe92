"""One device: the loss function with torch's autograd on whole parameters, micro-batch by micro-batch; and whether it is a
mean over rows, so that micro-batches train as the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from shardlib.common.environment import within
from shardlib.debug.finding import Difference, Finding, difference
from shardlib.debug.replay import PlanTrial, cells
from shardlib.debug.subject import in_float64, widened
from shardlib.debug.watching import LossWatch, NotedRun, copied, own_copy
from shardlib.errors import BatchError, LossError, ShardlibError
from shardlib.execute.context import casting
from shardlib.execute.layer_dropping import Layers
from shardlib.execute.losses import read_loss, wants
from shardlib.optim.base import GradientTransformation
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.tree import Tree, flatten, leaves_of, tree_map, unflatten

Leaves = dict[str, torch.Tensor]


class _OneOfSeveral:
    """A micro-batch without the others, as `shardlib.nn.gather_batch` takes them."""

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise LossError(
            "gather_batch: plans are compared micro-batch by micro-batch, and this loss needs all ranks' rows. Train some "
            "steps on sl.simulate(..., mesh=...) and on one device, and compare the parameters"
        )


@dataclass
class Evaluated:
    """One micro-batch on one device: its run, and path -> gradient of its total."""

    run: NotedRun
    grads: Leaves


class OneDevice:
    """One device that trains as a plan's ranks are to train together: in their dtypes, on the same micro-batches, without
    what the plan's steps leave out of layers.

    Attributes:
        leaves: path -> whole parameter, as the optimizer keeps it.
        state: the optimizer's.
    """

    leaves: dict[str, Any]
    state: Tree

    def __init__(
        self, plan: Plan, loss_fn: Callable[..., Any], params: Tree, optimizer: GradientTransformation, rng: Key
    ) -> None:
        self._plan, self._loss_fn, self._optimizer, self._rng = plan, loss_fn, optimizer, rng
        self._trained = [path for bucket in plan.trained for path in bucket.paths]
        dtypes = {path: bucket.master_dtype or bucket.dtype for bucket in plan.buckets for path in bucket.paths}
        given = dict(zip(*flatten(params)[:2], strict=True))
        self.leaves = {p.path: given[p.path].detach().to(p.compute.dtype).to(dtypes[p.path]) for p in plan.placements}
        self.state = optimizer.init({path: self.leaves[path] for path in self._trained})

    def used(self) -> Leaves:
        """Path -> parameter as the loss function gets it."""
        return {p.path: self.leaves[p.path].to(p.compute.dtype) for p in self._plan.placements}

    def key(self, step: int, cell: int) -> Key | None:
        """The key of a micro-batch: the step's, at the micro-batch's place in the global batch."""
        return self._rng.fold_in(step).at_slot(cell) if wants(self._loss_fn, "rng") else None

    def evaluate(self, step: int, cell: int, batch: Tree) -> Evaluated:
        """Loss and gradients of one micro-batch.

        Raises:
            LossError: the loss function does not return a loss, or runs in float32 and not in float64.
            BatchError: it raises an error, and the batch has no tensors.
        """
        used = self.used()
        try:
            return self._evaluated(step, cell, used, batch)
        except ShardlibError:
            raise
        except Exception as error:
            self._explain(error, step, cell, used, batch)
            raise

    def _explain(self, error: Exception, step: int, cell: int, used: Leaves, batch: Tree) -> None:
        """Raise what is known of an error of the loss function, for which a debugger's own float64 may be to blame."""
        raised = f"the loss function raised {type(error).__name__} ({str(error).partition(chr(10))[0]})"
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(batch)):
            raise BatchError(
                f"{raised} on a batch without tensors, {type(batch).__name__}: give the global batch"
            ) from error
        if all(leaf.dtype != torch.float64 for leaf in used.values()):
            return
        try:
            self._evaluated(step, cell, _in_float32(used), _in_float32(batch))
        except Exception:
            return
        raise LossError(
            f"{raised} in float64, and runs in float32. In float64 plans are compared: let it compute in its parameters' "
            "dtype, by operations that know float64 (transformers: experts_implementation='eager')"
        ) from error

    def _evaluated(self, step: int, cell: int, used: Leaves, batch: Tree) -> Evaluated:
        """See `evaluate`; of given parameters."""
        used = {path: copied(leaf).requires_grad_(path in self._trained) for path, leaf in used.items()}
        in_order = [used[leaf.path] for leaf in self._plan.leaves]
        tree = unflatten(self._plan.shape.treedef, in_order)
        watch, key = LossWatch(), self.key(step, cell)
        extra = {} if key is None else {"rng": key}
        seed = self._rng.fold_in(step).at_slot(cell)
        several = self._plan.batch_ranks * self._plan.step.microbatches > 1
        with (
            torch.enable_grad(),
            seeding_torch(seed, torch.device("cpu")),
            self._drops(step, seed, in_order),
            within(rows=_OneOfSeveral() if several else None),
            casting(self._plan.step.autocast, torch.device("cpu")),
        ):
            value = watch.watched(self._loss_fn)(tree, own_copy(batch), **extra)
        (run,) = watch.runs
        total = read_loss(value, False).total
        leaves = [used[path] for path in self._trained]
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
        found = zip(self._trained, leaves, grads, strict=True)
        return Evaluated(run, {path: torch.zeros_like(leaf) if g is None else copied(g) for path, leaf, g in found})

    @contextmanager
    def _drops(self, step: int, key: Key, leaves: list[torch.Tensor]) -> Iterator[None]:
        """A context in which blocks leave out what the step leaves out of layers, by its own draws."""
        layers = Layers(self._plan, torch.device("cpu"))
        layers.begin(self._plan.step.drops(step, key), computes=False)
        layers.know(leaves)
        inside = False

        def plainly(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return fn(*args, **kwargs)

        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal inside
            if inside:
                return layers.run_within(fn, args, kwargs, plainly)
            inside = True
            try:
                return layers.run(fn, args, kwargs, plainly)
            finally:
                inside = False

        with within(blocks=run):
            yield

    def update(self, grads: Leaves) -> None:
        """Update the parameters by gradients of the mean loss."""
        params = {path: self.leaves[path] for path in self._trained}
        given = {path: grads[path].to(params[path].dtype) for path in self._trained}
        updates, self.state = self._optimizer.update(given, self.state, params)
        self.leaves = self.leaves | {path: params[path] + updates[path] for path in self._trained}

    def state_of(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """Accessors of the optimizer's state -> tensor."""
        paths, leaves, _ = optree.tree_flatten_with_path(self.state)
        return {path: leaf for path, leaf in zip(paths, leaves) if isinstance(leaf, torch.Tensor)}


def is_weighted(evaluated: Sequence[Evaluated]) -> bool:
    """Whether the loss is a `Mean`, whose weights are summed."""
    return any(e.run.weight is not None and float(e.run.weight) != 1 for e in evaluated)


def mean_gradient(evaluated: Sequence[Evaluated], weighted: bool) -> tuple[float, Leaves]:
    """Loss, and gradient of the mean loss over all micro-batches."""
    weight = sum(float(e.run.weight) for e in evaluated if e.run.weight is not None) if weighted else len(evaluated)
    if not weight:
        raise LossError("the weights of sl.Mean are 0 in all micro-batches: give a batch in which something counts")
    loss = sum(float(e.run.total) for e in evaluated if e.run.total is not None) / weight
    grads = {path: sum(e.grads[path].double() for e in evaluated) / weight for path in evaluated[0].grads}
    return loss, grads  # type: ignore[return-value]


def _in_float32(tree: Tree) -> Tree:
    """A pytree whose float64 tensors are float32."""
    wide = torch.float64
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == wide else leaf, tree)


_NOT_COMPARED = (
    "whether the loss function is a mean over rows: it draws, and not row by row as sl.dropout does, so that micro-batches "
    "draw other numbers than the batch"
)


class OverRows(NamedTuple):
    """What `mean_over_rows` finds.

    Attributes:
        parts: number of micro-batches of all ranks.
        finding: a loss function that gives another mean for micro-batches than for the batch.
        note: why that could not be compared, or "".
    """

    parts: int
    finding: Finding | None = None
    note: str = ""


def mean_over_rows(plan: Plan, trial: PlanTrial) -> OverRows:
    """Compare the mean over the micro-batches of all ranks with the value for the batch, on one device in float64.

    Of a loss function that draws, micro-batches that are all alike tell whether it draws row by row. If not, a difference
    may be that of the draws.
    """
    wide, params, rows = in_float64(plan), widened(trial.params), widened(trial.batch)
    parts = cells(rows, wide)

    def device(key: Key) -> OneDevice:
        return OneDevice(wide, trial.loss_fn, params, trial.optimizer, key)

    one = device(trial.rng)
    evaluated = [one.evaluate(0, cell, part) for cell, part in enumerate(parts)]
    found = _difference(one, evaluated, rows)
    if found is None:
        return OverRows(len(parts))
    leaf, apart = found
    fullest = parts[max(range(len(parts)), key=lambda cell: _weight(evaluated[cell]))]
    alike = [one.evaluate(0, cell, fullest) for cell in range(len(parts))]
    if _difference(one, alike, _joined([fullest] * len(parts))):
        mine, its = (each.evaluate(0, 0, fullest).grads for each in (one, device(Key(0).fold_in("another"))))
        if any(not torch.equal(mine[path], its[path]) for path in mine):  # by the key
            return OverRows(len(parts), note=_NOT_COMPARED)
    finding = Finding(
        "forward",
        f"the loss function: its mean over {len(parts)} micro-batches is not its value for the batch",
        0,
        apart,
        leaf=leaf,
        note="it is no mean over rows; return sl.Mean(total, weight), or keep what mixes rows (statistics of a "
        "batch, capacities of experts) within fixed groups of rows",
    )
    return OverRows(len(parts), finding)


def _difference(device: OneDevice, parts: Sequence[Evaluated], batch: Tree) -> tuple[str, Difference] | None:
    """The first leaf whose gradient for the batch is not the mean over its parts, and how it differs."""
    weighted = is_weighted(parts)
    apart, together = (mean_gradient(of, weighted)[1] for of in (parts, [device.evaluate(0, 0, batch)]))
    differences = ((path, difference(apart[path], whole)) for path, whole in together.items())
    return next(((path, each) for path, each in differences if each.matters), None)


def _weight(evaluated: Evaluated) -> float:
    return 0.0 if evaluated.run.weight is None else float(evaluated.run.weight)


def _joined(parts: Sequence[Tree]) -> Tree:
    """The batch of these micro-batches."""
    columns = zip(*(flatten(part)[1] for part in parts), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], torch.Tensor) and c[0].dim() else c[0] for c in columns]
    return unflatten(flatten(parts[0])[2], leaves)

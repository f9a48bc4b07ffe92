"""Whether a loss function is a mean over rows, so that micro-batches train as the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding
from shardlib.debug.one_device import Evaluated, OneDevice, mean_gradient
from shardlib.debug.replay import PlanTrial, cells
from shardlib.debug.subject import in_float64, widened
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.tree import Tree, flatten, unflatten

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
    wide, rows = in_float64(plan), widened(trial.batch)

    def device(key: Key) -> OneDevice:
        return OneDevice(wide, trial.loss_fn, widened(trial.params), trial.optimizer, key)

    one, parts = device(trial.rng), cells(rows, wide)
    evaluated = _evaluated(one, parts)
    found = _difference(one, evaluated, rows)
    if found is None:
        return OverRows(len(parts))
    leaf, apart = found
    fullest = max(range(len(parts)), key=lambda cell: _weight(evaluated[cell]))
    alike = [parts[fullest]] * len(parts)
    if _difference(one, _evaluated(one, alike), _joined(alike)) and _draws(one, device, parts[fullest]):
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


def _evaluated(device: OneDevice, parts: Sequence[Tree]) -> list[Evaluated]:
    return [device.evaluate(0, cell, part) for cell, part in enumerate(parts)]


def _difference(device: OneDevice, parts: Sequence[Evaluated], batch: Tree) -> tuple[str, Difference] | None:
    """The first leaf whose gradient for the batch is not the mean over its parts, and how it differs."""
    weighted = any(e.run.weight is not None and float(e.run.weight) != 1 for e in parts)
    _, apart, _ = mean_gradient(parts, weighted)
    _, together, _ = mean_gradient([device.evaluate(0, 0, batch)], weighted)
    differences = ((path, difference(apart[path], whole)) for path, whole in together.items())
    return next(((path, each) for path, each in differences if each.matters), None)


def _weight(evaluated: Evaluated) -> float:
    return 0.0 if evaluated.run.weight is None else float(evaluated.run.weight)


def _joined(parts: Sequence[Tree]) -> Tree:
    """The batch of these micro-batches."""
    columns = zip(*(flatten(part)[1] for part in parts), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], torch.Tensor) and c[0].dim() else c[0] for c in columns]
    return unflatten(flatten(parts[0])[2], leaves)


def _draws(one: OneDevice, device: Callable[[Key], OneDevice], part: Tree) -> bool:
    """Whether the loss function, or what a step leaves out, depends on the key."""
    other = device(Key(0).fold_in("another"))
    mine, its = (each.evaluate(0, 0, part).grads for each in (one, other))
    return any(not torch.equal(mine[path], its[path]) for path in mine)

"""The end of a step: loss and norm, the update of the optimizer's shards, and the parameters that are gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import getclosurevars
from typing import Any

import optree
import torch

from shardlib.debug.finding import Difference, Finding, difference, tolerance, worst
from shardlib.debug.layout import segments, shards
from shardlib.debug.view import Bad, StepView
from shardlib.mesh.launch import simulate
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import GradientTransformation
from shardlib.optim.combine import OptimizerChain
from shardlib.optim.shards import MeshShards
from shardlib.plan.plan import Plan


def norm(view: StepView) -> Finding | None:
    """A loss or a norm of gradients that differs."""
    if view.plan.reductions.owner is not None:
        return None  # its ranks have gradients of their own
    narrow = max((dtype for b in view.plan.trained for dtype in (b.dtype, b.reduce_dtype)), key=tolerance)
    loss, mean = view.mean
    grads = view.assembled(view.grads) if view.plan.channels else mean
    squares = sum(float(grad.double().square().sum()) for grad in grads.values())
    wanted = {"loss": ("the mean of the losses", loss), "grad_norm": ("the norm of the gradients", squares**0.5)}
    for name, (what, number) in wanted.items():
        due = torch.tensor(number, dtype=torch.float64)
        found = ((rank, step.metrics[name]) for rank, step in view.ranks.items() if name in step.metrics)
        if bad := worst((rank, difference(got.double().cpu(), due, narrow)) for rank, got in found):
            return view.finding("norm", f"{what} over all ranks", bad)
    return None


def update(view: StepView, optimizer: GradientTransformation) -> Finding | None:
    """The first thing after the gradients that differs. One device goes on to the next step."""
    if view.plan.reductions.owner is not None:
        return None  # its ranks are to differ from one device
    grads, before = view.assembled(view.grads), dict(view.device.leaves)
    view.device.update(grads)
    written = {rank: step.written for rank, step in view.ranks.items()}
    found = view.first_leaf(view.device.leaves, written, "optimizer")
    differs = ("the update of parameters", *found[1:]) if found else _state(view)
    if differs:
        what, path, bad = differs
        member = _member(view, optimizer, grads, before)
        return view.finding("update", member or what, bad, leaf=path, note=f"{what} differs" if member else "")
    stored = {rank: step.params for rank, step in view.ranks.items()}
    if found := view.first_leaf(view.device.used(), stored, "param"):
        bucket, path, bad = found
        axes = bucket.axes[bucket.param_level :]
        if axes:
            what = f"the gather of unit {bucket.label} over axis {' and '.join(map(repr, axes))} after the update"
        else:
            what = f"the copy of unit {bucket.label} to the stored parameters"
        return view.finding("gather after the update", what, bad, leaf=path)
    return None


def _state(view: StepView) -> tuple[str, str, Bad] | None:
    """A leaf of the optimizer's state that differs: the state in words, the parameter's path, and how."""
    wanted = view.device.state_of()
    apart: dict[tuple[str, str], list[tuple[int, Difference]]] = {}
    for rank, step in view.ranks.items():
        for path, name, each in _compared(view, rank, step.inner, wanted):
            apart.setdefault((path, name), []).append((rank, each))
    for (path, name), differences in apart.items():
        if bad := worst(differences):
            return f"the optimizer's state {name}", path, bad
    return None


def _compared(
    view: StepView, rank: int, inner: Any, wanted: Mapping[tuple[Any, ...], torch.Tensor]
) -> Iterator[tuple[str, str, Difference]]:
    """Path, name and difference of each tensor that the optimizer keeps on a rank."""
    paths, leaves, _ = optree.tree_flatten_with_path(inner)
    coords, numbering = view.coords(rank), view.plan.at(view.coords(rank)).numbering
    for accessors, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if accessors in wanted and leaf.dim() == 0:
            yield "", "/".join(map(str, accessors)), difference(leaf.double(), wanted[accessors].double(), leaf.dtype)
            continue
        position = next((i for i, key in enumerate(accessors) if numbering.run_named(key)), None)
        if position is None:
            continue
        _, run = numbering.run_named(accessors[position])  # type: ignore[misc]
        above, below = accessors[:position], accessors[position + 1 :]
        wholes = {path: wanted[key] for path in run.paths if (key := (*above, path, *below)) in wanted}
        shapes = {path: view.plan.placement_of[path].compute.shape for path in run.paths}
        if shapes != {path: whole.shape for path, whole in wholes.items()} or leaf.numel() != run.owned:
            continue
        mine = segments(run, leaf, run.levels)
        for (path, due), got in zip(shards(view.plan, run, wholes, coords, run.levels), mine, strict=True):
            yield path, "/".join(map(str, (*above, *below))), difference(got, due)


def _members(optimizer: GradientTransformation) -> list[GradientTransformation]:
    """The transformations of a chain, in order; of any other transformation itself."""
    if not isinstance(optimizer, OptimizerChain):
        return [optimizer]
    return [each for tx in optimizer.transformations for each in _members(tx)]


def _member(
    view: StepView,
    optimizer: GradientTransformation,
    grads: Mapping[str, torch.Tensor],
    params: Mapping[str, torch.Tensor],
) -> str:
    """The first transformation of a chain that gives other updates on shards than on one device, from a fresh state; "" if
    none does."""
    updates = dict(grads)
    for tx in _members(optimizer) if optimizer.owns is None else ():
        given = {path: updates[path].to(params[path].dtype) for path in updates}
        some = {path: params[path] for path in given}
        wanted, _ = tx.update(given, tx.init(some), some)

        def of_rank(mesh: Mesh, tx: Any = tx, given: Any = given, some: Any = some) -> dict[str, torch.Tensor]:
            plan = view.plan.at(mesh.coords)
            at = MeshShards(plan, mesh)
            mine, held = (_buffers(plan, wholes, mesh.coords) for wholes in (given, some))
            return dict(tx.update(mine, tx.init(held, shards=at), held, shards=at)[0])

        try:
            found = dict(enumerate(simulate(of_rank, mesh=view.plan.sizes)))
        except Exception:  # what fails alone is not what differs
            return ""
        if view.first_leaf(wanted, found, "optimizer"):
            return f"{_called(tx)}, from the same gradients"
        updates = wanted
    return ""


def _buffers(plan: Plan, wholes: Mapping[str, torch.Tensor], coords: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Bucket name -> a rank's flat shard in the optimizer's layout."""
    return {
        bucket.name: torch.cat([shard for _, shard in shards(plan, bucket, wholes, coords, bucket.levels)])
        for bucket in plan.trained
    }


def _called(tx: GradientTransformation) -> str:
    """What makes a transformation: the function whose closure it is."""
    for fn in (tx._update, tx._init):
        for name in _names(fn):
            if name != "stepping":
                return name
    return "the optimizer"


def _names(fn: Callable[..., Any], depth: int = 3) -> Iterator[str]:
    """The outermost functions that ``fn`` and the functions in its closure were made in."""
    yield getattr(fn, "__qualname__", "").split(".")[0]
    if depth and hasattr(fn, "__code__"):
        for inside in getclosurevars(fn).nonlocals.values():
            if callable(inside) and hasattr(inside, "__code__"):
                yield from _names(inside, depth - 1)

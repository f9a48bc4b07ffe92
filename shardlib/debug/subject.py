"""What is compared with one device: a plan, in its own dtypes or in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.make_plan import make_plan
from shardlib.mesh.mesh import abstract_mesh
from shardlib.mesh.specs import Leaf
from shardlib.optim.base import GradientTransformation
from shardlib.plan.buckets import Bucket
from shardlib.plan.placement import Placement
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform, chain
from shardlib.tree import Tree, tree_map, unflatten

_MOST_RANKS = 64


def plan_of(given: Any, params: Tree, what: str) -> Plan:
    """The plan that a user gives: of `make_plan`, or as a pair (sizes of the mesh, transform).

    Raises:
        TypeError: it is neither.
        IllegalComposition: a plan on more ranks than can be simulated, or with states in files.
    """
    if isinstance(given, Plan):
        plan = given.everywhere.layout  # a train step adds its optimizer's claim again
    elif _is_pair(given):
        sizes, transform = given
        plan = make_plan(params, abstract_mesh(**sizes), chain() if transform is None else transform)
    else:
        raise TypeError(
            f"{what} is a {type(given).__name__}; give a plan of sl.make_plan, or a pair of a mesh's sizes and a transform: "
            "(dict(data=4), sl.zero(2))"
        )
    ranks = 1
    for size in plan.sizes.values():
        ranks *= size
    if ranks > _MOST_RANKS:
        raise IllegalComposition(
            f"{what} is for {ranks} ranks, and {_MOST_RANKS} at most are simulated in one process; give the same transforms "
            "on a smaller mesh, every axis of 2 say"
        )
    if any("disk" in bucket.memory for bucket in plan.buckets):
        raise IllegalComposition(f"{what} keeps states on disk; give the plan with offload('host') in its place")
    return plan


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], Mapping)
        and (given[1] is None or isinstance(given[1], Transform))
    )


def in_float64(plan: Plan) -> Plan:
    """The same plan with float64 in place of every floating dtype, the same buckets and exchanges; see `left_out`."""
    plan = like_one_device(plan)
    codecs = {axis: codec for axis, codec in plan.reductions.codecs.items() if codec.wide}
    step = replace(plan.step, cast_batch=None if plan.step.cast_batch is None else torch.float64, autocast=None)
    return replace(
        plan,
        placements=tuple(map(_wide_placement, plan.placements)),
        buckets=tuple(map(_wide_bucket, plan.buckets)),
        reductions=replace(plan.reductions, codecs=codecs),
        step=step,
        needs=None,
    )


def like_one_device(plan: Plan) -> Plan:
    """The same plan without what makes its ranks compute other numbers: gathers and products in few bits."""
    placements = tuple(replace(placement, scaled=False) for placement in plan.placements)
    return replace(plan, placements=placements, reductions=replace(plan.reductions, packings={}), traces=None)


def is_float64(plan: Plan) -> bool:
    """Whether a plan computes in float64 throughout, so that `in_float64` leaves it as it is."""
    return in_float64(plan).buckets == plan.buckets and not left_out(plan)


def left_out(plan: Plan, optimizer: GradientTransformation | None = None) -> list[str]:
    """What is not compared in float64, or with this optimizer, a line each."""
    codecs, packings = plan.reductions.codecs, plan.reductions.packings
    sums = [f"in float64, gradients over axis {axis!r} in {codec}" for axis, codec in codecs.items() if not codec.wide]
    gathers = [f"gathers over axis {axis!r} in {packing}" for axis, packing in packings.items()]
    owned = (
        [f"the sums and updates of {optimizer.owns.name}, and the steps after the first"]
        if optimizer and optimizer.owns
        else []
    )
    scaled = sum(placement.scaled for placement in plan.placements)
    products = [f"matrix products in 8 bits, by {scaled} parameters"] if scaled else []
    return [*sums, *gathers, *products, *owned]


def by_design(plans: Mapping[str, Plan]) -> list[str]:
    """What one of two plans does by itself and the other does not, a line each: either is compared with one device that does
    as it does.

    Args:
        plans: name -> plan. One alone is to train as one device, and has no such differences.
    """
    notes = []
    for (one, mine), (other, its) in itertools.permutations(plans.items(), 2):
        frozen = sorted(_trained(its) - _trained(mine))
        if frozen:
            more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
            notes.append(f"that {one} does not train {', '.join(frozen[:3])}{more}, and {other} does")
        drops = (mine.step.layer_drop, its.step.layer_drop), (mine.step.token_drop, its.step.token_drop)
        notes += [
            f"that {one} leaves out parts of layers, {drop}, and {other} does not do so"
            for drop, same in drops
            if drop is not None and drop != same
        ]
    return notes


def _trained(plan: Plan) -> set[str]:
    """The paths of the leaves that a plan trains."""
    return {path for bucket in plan.trained for path in bucket.paths}


def eagerly() -> AbstractContextManager[None]:
    """A context in which compiled functions run as they were written, so that their calls can be compared."""
    return torch.compiler.set_stance("force_eager")


def widened(tree: Tree) -> Tree:
    """A pytree whose floating tensors are float64; tied tensors stay tied."""
    made: dict[int, torch.Tensor] = {}

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return made.setdefault(id(leaf), leaf.detach().double())

    return tree_map(wide, tree)


def drawn(plan: Plan) -> Tree:
    """Values for the parameters of a plan, from N(0, 0.2²) in float64; zeros for those that are no floating tensors."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for placement in plan.placements:
        leaf = placement.compute
        value = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * 0.2
        made[placement.path] = value if leaf.dtype.is_floating_point else torch.zeros(leaf.shape, dtype=leaf.dtype)
    return unflatten(plan.shape.treedef, [made[leaf.path] for leaf in plan.leaves])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _wide_leaf(leaf: Leaf | None) -> Leaf | None:
    return leaf and replace(leaf, dtype=_wide(leaf.dtype))


def _wide_placement(placement: Placement) -> Placement:
    roles = {role: _wide_leaf(getattr(placement, role)) for role in ("compute", "param", "grad", "optimizer")}
    return replace(placement, **roles)  # type: ignore[arg-type]


def _wide_bucket(bucket: Bucket) -> Bucket:
    master = bucket.master_dtype and _wide(bucket.master_dtype)
    return replace(bucket, dtype=_wide(bucket.dtype), reduce_dtype=_wide(bucket.reduce_dtype), master_dtype=master)

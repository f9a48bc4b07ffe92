"""What is compared with one device: a plan, in its own dtypes or in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import abstract_mesh
from shardlib.optim.base import GradientTransformation
from shardlib.plan.placement import Placement
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform, chain
from shardlib.planning import make_plan
from shardlib.tree import Tree, tree_map, unflatten

_MOST_RANKS = 64


def plan_of(given: Any, params: Tree, what: str) -> Plan:
    """The plan that a user gives: of `make_plan`, or as a pair (sizes of the mesh, transform). Refuses what is neither, on
    more ranks than can be simulated, or with states in files."""
    match given:
        case Plan():
            plan = given.everywhere.layout  # a train step adds its optimizer's claim again
        case (Mapping() as sizes, Transform() | None as transform):
            plan = make_plan(params, abstract_mesh(**sizes), chain() if transform is None else transform)
        case _:
            raise TypeError(
                f"{what} is a {type(given).__name__}; give a plan of sl.make_plan, or a pair (dict(data=4), sl.zero(2))"
            )
    if (ranks := math.prod(plan.sizes.values())) > _MOST_RANKS:
        raise IllegalComposition(
            f"{what} is for {ranks} ranks, and {_MOST_RANKS} at most are simulated. Make every axis of the mesh 2, say"
        )
    if any("disk" in bucket.memory for bucket in plan.buckets):
        raise IllegalComposition(f"{what} keeps states on disk; give the plan with offload('host')")
    return plan


def in_float64(plan: Plan) -> Plan:
    """The same plan with float64 in place of every floating dtype, the same buckets and exchanges; see `left_out`."""
    plan = like_one_device(plan)
    codecs = {axis: codec for axis, codec in plan.reductions.codecs.items() if codec.wide}
    step = replace(plan.step, cast_batch=None if plan.step.cast_batch is None else torch.float64, autocast=None)
    return replace(
        plan,
        placements=tuple(map(_wide_placement, plan.placements)),
        buckets=tuple(_wide(bucket, "dtype", "reduce_dtype", "master_dtype") for bucket in plan.buckets),
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
    scaled = sum(placement.scaled for placement in plan.placements)
    products = [f"matrix products in 8 bits, by {scaled} parameters"] * bool(scaled)
    owner = optimizer and optimizer.owns
    owned = [f"the sums and updates of {owner.name}, and the steps after the first"] if owner else []
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
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return made.setdefault(id(leaf), leaf.detach().double()) if floating else leaf

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


def _wide(of: Any, *names: str) -> Any:
    """A value with float64 in place of the floating dtypes among some of its attributes."""
    dtypes = {name: getattr(of, name) for name in names}
    wide = {name: torch.float64 for name, dtype in dtypes.items() if dtype is not None and dtype.is_floating_point}
    return replace(of, **wide)


def _wide_placement(placement: Placement) -> Placement:
    leaves = {role: getattr(placement, role) for role in ("compute", "param", "grad", "optimizer")}
    return replace(placement, **{role: leaf and _wide(leaf, "dtype") for role, leaf in leaves.items()})

"""What a step as a function of values does not have, by the name of the transform that asks for it."""

from __future__ import annotations

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.plan import Plan


def missing(plan: Plan) -> list[str]:
    """The transforms of a plan that a step as a function of values does not have, each with what to put in its place."""
    step, buckets = plan.step, plan.buckets
    found = {
        "pipeline: leave it out, or use more ranks on the axis of zero": plan.stages.axis is not None,
        "remat(blocks=): recompute all blocks": step.remat is not None and step.remat.blocks is not None,
        "remat(store=): keep inputs of blocks on the device": step.remat is not None and bool(step.remat.store),
        "progressive_layer_drop, random_ltd: leave them out": step.thins,
        "tile: use remat(), or more ranks on the axis of zero": bool(step.module_tiles)
        or any(bucket.tiles > 1 for bucket in buckets),
    }
    return [what for what, there in found.items() if there]


def require_values(plan: Plan, what: str, otherwise: str) -> None:
    """Refuse a plan that a step as a function of values cannot run.

    Args:
        what: what needs such a step.
        otherwise: what works with every plan.

    Raises:
        IllegalComposition: names the transforms, and a remedy for each.
    """
    lacks, reductions = missing(plan), plan.reductions
    found = {
        "sequence: use tensor_slicing over that axis": plan.step.sequence
        is not None,  # parts are checked in a first step
        "offload: keep parameters, gradients and states on the device": bool(plan.step.ahead)
        or any(set(bucket.memory) != {"device"} for bucket in plan.buckets),
        "precision('fp8'): use 'bf16'": any(placement.scaled for placement in plan.placements),
        "reproducible: leave it out": plan.step.tree,
        # Residuals are part of a state, and what is rounded has no derivative.
        "onebit, quantize, powersgd: send what is not compressed": bool(reductions.codecs or reductions.packings),
        "hierarchical: use replicate=": reductions.second_level is not None,
        "an optimizer that sums over an axis itself: use sl.optim.adamw": reductions.owner is not None,
    }
    lacks += [each for each, there in found.items() if there]
    if lacks:
        raise IllegalComposition(f"{what} does not go together with\n{listing(lacks)}\nOr {otherwise}")

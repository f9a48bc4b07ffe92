"""What a step as a function of values does not have, by the name of the transform that asks for it."""

from __future__ import annotations

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.plan import Plan


def missing(plan: Plan) -> list[str]:
    """The transforms of a plan that a step as a function of values does not have, each with what to put in its place."""
    step, buckets, reductions = plan.step, plan.buckets, plan.reductions
    found = {
        "remat(blocks=): recompute all blocks": step.remat is not None and step.remat.blocks is not None,
        "remat(store=): keep inputs of blocks on the device": step.remat is not None and bool(step.remat.store),
        "precision('fp8'): use 'bf16'": any(placement.scaled for placement in plan.placements),
        "reproducible: leave it out": step.tree,
        "progressive_layer_drop, random_ltd: leave them out": step.thins,
        "experts: keep all experts on each rank": step.tokens is not None
        or any(placement.dealt for placement in plan.placements),
        "tile: use remat(), or more ranks on the axis of zero": bool(step.module_tiles)
        or any(bucket.tiles > 1 for bucket in buckets),
        "offload: keep parameters, gradients and states on the device": step.ahead
        or any(set(bucket.memory) != {"device"} for bucket in buckets),
        "onebit, quantize, powersgd: send what is not compressed": bool(reductions.codecs or reductions.packings),
        "hierarchical: use replicate=": reductions.second_level is not None,
        "an optimizer that sums over an axis itself: use sl.optim.adamw": reductions.owner is not None,
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
    lacks = missing(plan)
    if plan.step.sequence is not None:  # what a loss function does with parts is checked in a step's first run
        lacks.append("sequence: use tensor_slicing over that axis")
    if plan.stages.axis is not None:
        lacks.append("pipeline: leave it out, or use more ranks on the axis of zero")
    if lacks:
        raise IllegalComposition(f"{what} does not go together with\n{listing(lacks)}\nOr {otherwise}")


def require_graph(plan: Plan) -> None:
    """Refuse a plan that a graph does not have. Raises `IllegalComposition`, with all transforms."""
    lacks, how = missing(plan), plan.step.remat
    if how is not None and (how.save or how.policy not in ("full", "dots")):
        lacks.append("remat(save=), policies of your own: use remat() or remat('dots')")
    if lacks:
        raise IllegalComposition(f"compile=True does not go together with\n{listing(lacks)}\nOr leave it out")

"""What a step as a function of values does not have, by the name of the transform that asks for it."""

from __future__ import annotations

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.plan import Plan


def require_values(plan: Plan, what: str, otherwise: str) -> None:
    """Refuse a plan that a step as a function of values cannot run.

    Args:
        what: what needs such a step.
        otherwise: what works with every plan.

    Raises:
        IllegalComposition: names the transforms, and a remedy for each.
    """
    reductions, remat = plan.reductions, plan.step.remat
    found = {
        "progressive_layer_drop, random_ltd: leave them out": plan.step.thins,
        # Whole tiles would wait together for backward.
        "tile: use remat(), or more ranks on the axis of zero": bool(plan.step.module_tiles)
        or any(bucket.tiles > 1 for bucket in plan.buckets),
        "remat(blocks=): recompute all blocks": remat is not None and remat.blocks is not None,
        "remat(store=): keep inputs of blocks on the device": remat is not None and bool(remat.store),
        "pipeline: leave it out, or use more ranks on the axis of zero": plan.stages.axis is not None,
        # Parts are checked in a step's first run.
        "sequence: use tensor_slicing over that axis": plan.step.sequence is not None,
        "precision('fp8'): use 'bf16'": any(placement.scaled for placement in plan.placements),
        "hierarchical: use replicate=": reductions.second_level is not None,
        # Residuals are part of a state, and what is rounded has no derivative.
        "onebit, quantize, powersgd: send what is not compressed": bool(reductions.codecs or reductions.packings),
    }
    lacks = [*_of_a_step(plan), *(each for each, there in found.items() if there)]
    if lacks:
        raise IllegalComposition(f"{what} does not go together with\n{listing(lacks)}\nOr {otherwise}")


def require_graph(plan: Plan) -> None:
    """Refuse a plan that a graph does not have. Raises `IllegalComposition`, with all transforms."""
    lacks = []
    if plan.step.layer_drop is not None:
        lacks.append("progressive_layer_drop: leave it out, or use random_ltd")
    if plan.step.tokens is not None and plan.step.tokens.spare:
        lacks.append("experts(spare=): leave spare out")
    if plan.stages.axis is not None:
        lacks += _of_a_step(plan)
        if plan.reductions.codecs:
            lacks.append("onebit, quantize(gradients=), powersgd: send what is not compressed, or leave out pipeline")
    if lacks:
        raise IllegalComposition(f"compile=True does not go together with\n{listing(lacks)}\nOr leave it out")


def _of_a_step(plan: Plan) -> list[str]:
    """What a step does with gradients that are complete, and that one micro-batch alone, or one stage, does not."""
    found = {
        "offload: keep parameters, gradients and states on the device": bool(plan.step.ahead)
        or any(set(bucket.memory) != {"device"} for bucket in plan.buckets),
        "reproducible: leave it out": plan.step.tree,
        "an optimizer that sums over an axis itself: use sl.optim.adamw": plan.reductions.owner is not None,
    }
    return [each for each, there in found.items() if there]

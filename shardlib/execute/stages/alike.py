"""Stages that are alike: equal functions over equally treated parameters. One of them is traced for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardlib.execute.stages.walk import Walk
from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.plan.value import PlanValue


def kinds_of(plan: Plan, blocks: Sequential) -> list[list[Any]]:
    """For each stage what it does, without its blocks' numbers: stages of equal kinds are alike if their carries are."""
    named = _names(plan)
    return [
        [
            blocks.functions[start:stop],
            *_treated(plan, stage, {name: str(place) for place, name in enumerate(named[start:stop])}),
        ]
        for stage, (start, stop) in enumerate(plan.stages.spans)
    ]


def as_another(walk: Walk, plan: Plan, stage: int, other: int) -> Walk:
    """The walk of one stage as that of another one like it: with its units."""
    ours, theirs = (plan.of_stage(number).tiled.buckets for number in (stage, other))
    units = {bucket.unit: like.unit for bucket, like in zip(ours, theirs, strict=True)}
    forward, backward, reduced = (tuple(units[unit] for unit in some) for some in (*walk.touches, walk.reduced))
    return replace(walk, touches=(forward, backward), reduced=reduced)


def _names(plan: Plan) -> list[str]:
    """The name of each block in the list: its number, in a short form that in the whole; "" without parameters."""
    starts, start = [], 0
    for child in plan.shape.treedef.children():
        starts.append(plan.shape.paths[start].partition("/")[0] if child.num_leaves else "")
        start += child.num_leaves
    return starts


def _treated(plan: Plan, stage: int, places: dict[str, str]) -> list[Any]:
    """What a plan does with a stage's parameters. What several stages share keeps its names, and is like nothing else.

    Args:
        places: name of each of the stage's blocks -> its place among them.
    """
    view = plan.of_stage(stage)
    found: list[Any] = []
    alone = {bucket.name for bucket in view.buckets if len(bucket.stages) == 1}
    units = {unit: str(place) for place, unit in enumerate(view.units)}  # which may be of several blocks

    def local(path: str) -> str:
        block, slash, rest = path.partition("/")
        return f"{places.get(block, block)}{slash}{rest}"

    for bucket in view.buckets:
        if bucket.name in alone:
            bucket = replace(
                bucket,
                name="",
                unit=units[bucket.unit],
                paths=tuple(map(local, bucket.paths)),
                stages=(0,),
                homes=(0,),
            )
        found.append(bucket)
    for placement in _placements(view):
        name = local if placement.bucket in alone else str
        leaf = replace(placement.compute, path=name(placement.path))
        found.append((leaf, list(map(name, placement.aliases)), placement.style, placement.dealt))
    tiles = plan.step.module_tiles.items()
    return [*found, {local(path): number for path, number in tiles if path.partition("/")[0] in places}]


def _placements(view: PlanValue) -> list[Any]:
    return [view.placement_of[path] for bucket in view.buckets for path in bucket.paths]

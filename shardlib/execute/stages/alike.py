"""Stages that are alike: equal functions over equally treated parameters. One of them is traced for all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.plan.value import PlanValue


def kinds_of(plan: Plan, blocks: Sequential) -> list[list[Any]]:
    """For each stage what it does, without its blocks' numbers: stages of equal kinds are alike if their carries are."""
    return [
        [
            blocks.functions[start:stop],
            *_treated(plan, stage, start),
        ]
        for stage, (start, stop) in enumerate(plan.stages.spans)
    ]


def _treated(plan: Plan, stage: int, start: int) -> list[Any]:
    """What a plan does with a stage's parameters. What several stages share keeps its names, and is like nothing else."""
    view = plan.of_stage(stage)
    found: list[Any] = []
    alone = {bucket.name for bucket in view.buckets if len(bucket.stages) == 1}
    for bucket in view.buckets:
        if bucket.name in alone:
            bucket = replace(
                bucket,
                name="",
                unit=_moved(bucket.unit, -start),
                paths=tuple(_moved(path, -start) for path in bucket.paths),
                home=None if bucket.home is None else _moved(bucket.home, -start),
                stages=(0,),
                homes=(0,),
            )
        found.append(bucket)
    for placement in _placements(view):
        shift = -start if placement.bucket in alone else 0
        leaf = replace(placement.compute, path=_moved(placement.path, shift))
        found.append((leaf, [_moved(path, shift) for path in placement.aliases], placement.style, placement.dealt))
    tiles = {_moved(path, -start): number for path, number in plan.step.module_tiles.items()}
    return [*found, tiles if plan.step.module_tiles else None]


def _placements(view: PlanValue) -> list[Any]:
    return [view.placement_of[path] for bucket in view.buckets for path in bucket.paths]


def as_another(trace: Trace, blocks: int) -> Trace:
    """The trace of a stage as that of one like it whose blocks come ``blocks`` later."""

    def phase(text: str) -> str:
        return re.sub(r"(?<=block )\d+", lambda number: str(int(number[0]) + blocks), text)

    touches = tuple(_moved(unit, blocks) for unit in trace.touches)
    return replace(trace, touches=touches, live_in=phase(trace.live_in), peak_in=phase(trace.peak_in))


def _moved(path: str, blocks: int) -> str:
    """A path, or the name of a unit, in a list of blocks, that many blocks later."""
    first, slash, rest = path.partition("/")
    return f"{int(first) + blocks}{slash}{rest}" if first.isdigit() else path

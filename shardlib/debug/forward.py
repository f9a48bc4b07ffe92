"""The forward of a step: micro-batches, keys, gathered parameters, and then block by block and call by call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding, worst
from shardlib.debug.layout import shards
from shardlib.debug.view import StepView
from shardlib.plan.buckets import Bucket
from shardlib.tree import leaves_of

_ALL = Difference(float("inf"), 0.0, 0.0)


def forward(view: StepView) -> Finding | None:
    """The first thing in the forward that differs."""
    for cell in range(len(view.evaluated)):
        found = _batch(view, cell) or _key(view, cell)
        if found:
            return found
    if found := _gathers(view):
        return found
    for cell in range(len(view.evaluated)):
        if found := _parameters(view, cell) or _calls(view, cell):
            return found
    return None


def _batch(view: StepView, cell: int) -> Finding | None:
    wanted = [leaf for leaf in leaves_of(view.microbatches[cell]) if isinstance(leaf, torch.Tensor)]
    differences = [
        (rank, difference(mine, due))
        for rank, runs in view.runs(cell).items()
        for run in runs
        for mine, due in zip(run.batch, wanted, strict=True)
    ]
    bad = worst(differences)
    return bad and view.cell_finding("forward", "the micro-batch that the loss function is given", bad, cell)


def _key(view: StepView, cell: int) -> Finding | None:
    wanted = view.device.key(view.number, cell)
    others = [
        (rank, run.key)
        for rank, runs in view.runs(cell).items()
        for run in runs
        if run.key is not None and wanted is not None and run.key != wanted
    ]
    if not others:
        return None
    what = "seed" if others[0][1].seed != wanted.seed else "slot"  # type: ignore[union-attr]
    note = f"its {what} is {getattr(others[0][1], what)}, and should be {getattr(wanted, what)}"
    ranks = tuple(sorted({rank for rank, _ in others}))
    return view.cell_finding("forward", "the random key of the micro-batch", (ranks, _ALL), cell, note=note)


def gather_named(bucket: Bucket) -> str:
    """The gather of a bucket's unit, in words."""
    axes = " and ".join(repr(axis) for axis in bucket.axes[: bucket.param_level])
    return (
        f"the gather of unit {bucket.label} over axis {axes}" if axes else f"the use of unit {bucket.label} as stored"
    )


def _gathers(view: StepView) -> Finding | None:
    """An all-gather in which a rank sends other values than its shard, or gets others than were sent."""
    now = view.device.used()
    for exchange in view.replay.wire.exchanges:
        if exchange.op != "all_gather" or exchange.step != view.number:
            continue
        buckets = [bucket for bucket in view.plan.tiled.buckets if bucket.label == exchange.about and bucket.tiles == 1]
        buckets = [bucket for bucket in buckets if bucket.home is None and bucket.param_level]
        if not buckets or view.plan.reductions.packings:
            continue
        bad = [
            (exchange.members[number], apart)
            for number, sent in exchange.sent.items()
            if (apart := _nearest(view, buckets, sent, exchange.members[number], now)) is not None
        ]
        if wrong := worst(bad):
            return view.finding(
                "forward", gather_named(buckets[0]), wrong, note="what is sent is not the rank's shard of this step"
            )
    return None


def _nearest(
    view: StepView, buckets: list[Bucket], sent: torch.Tensor, rank: int, now: dict[str, torch.Tensor]
) -> Difference | None:
    """The difference of what a rank sends from its shard, of the buckets of that size the nearest one's."""
    coords, nearest = view.coords(rank), None
    for bucket in buckets:
        for level in range(1, bucket.param_level + 1):
            if bucket.size(level) != sent.numel():
                continue
            due = torch.cat([shard for _, shard in shards(view.plan, bucket, now, coords, level)])
            each = difference(sent.reshape(-1), due)
            nearest = each if nearest is None or each.error < nearest.error else nearest
    return nearest


def _parameters(view: StepView, cell: int) -> Finding | None:
    """A parameter that a block is given with other values than the state's."""
    now = view.device.used()
    placed = view.plan.placement_of
    for rank, runs in view.runs(cell).items():
        for run in runs:
            for block in run.blocks.values():
                for path, value in block.params.items():
                    if path in placed and value.shape == now[path].shape and view.plan.reductions.packings == {}:
                        apart = difference(value, now[path])
                        if apart.matters:
                            bucket = view.plan.bucket_of[placed[path].bucket]
                            return view.cell_finding(
                                "forward", gather_named(bucket), ((rank,), apart), cell, leaf=path, block=block.name
                            )
    return None


def _calls(view: StepView, cell: int) -> Finding | None:
    """The first call whose values differ, in the first block whose outputs do."""
    wanted, start = view.evaluated[cell].run, 0
    for number, block in [*wanted.blocks.items(), (None, None)]:
        inside = [n for n, call in enumerate(wanted.calls) if call.block == number]
        stop = len(wanted.calls) if block is None else max(inside, default=start - 1) + 1
        if block is None:
            name, bad = "", _loss(view, cell)
        else:
            name = block.name
            outputs = [
                (rank, apart)
                for rank, runs in view.runs(cell).items()
                for run in runs
                if number in run.blocks
                and (apart := view.apart(rank, run.blocks[number].outputs, block.outputs)) is not None
            ]
            bad = worst(outputs)
        if bad:
            return _within(view, cell, range(start, stop)) or view.cell_finding(
                "forward", f"the output of block {name}" if name else "the loss", bad, cell, block=name
            )
        start = stop
    return None


def _loss(view: StepView, cell: int) -> tuple[tuple[int, ...], Difference] | None:
    total = view.evaluated[cell].run.total
    return worst(
        (rank, difference(run.total, total))
        for rank, runs in view.runs(cell).items()
        for run in runs
        if run.total is not None and total is not None
    )


def _within(view: StepView, cell: int, numbers: range) -> Finding | None:
    wanted, aligned = view.evaluated[cell].run, view.aligned(cell)
    for number in numbers:
        call = wanted.calls[number]
        bad = worst(_values(view, number, call.values, aligned))
        if bad:
            leaf = call.paths[0] if call.paths else ""
            block = "" if call.block is None else wanted.blocks[call.block].name
            return view.cell_finding(
                "forward", call.label, bad, cell, leaf=leaf, block=block, where=call.where, note=how(view, leaf)
            )
    return None


def _values(view: StepView, number: int, wanted: list, aligned: dict) -> Iterator[tuple[int, Difference]]:
    for rank, calls in aligned.items():
        if number in calls:
            apart = view.apart(rank, calls[number].values, wanted)
            if apart is not None:
                yield rank, apart


def how(view: StepView, leaf: str) -> str:
    """How the plan places a leaf, where it does not lie whole on every rank."""
    placement = view.plan.placement_of.get(leaf)
    if placement is None:
        return ""
    said = [f"style {placement.style} over {placement.compute.spec!r}"] * (placement.style is not None)
    said += [f"stored as {placement.param.spec!r}"] * bool(placement.param.spec.axes)
    return "; ".join(said)

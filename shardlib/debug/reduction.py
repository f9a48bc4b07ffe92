"""The sums of gradients: over micro-batches, then exchange by exchange along each bucket's route."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from shardlib.debug.backward import backward, interrupted
from shardlib.debug.compressed import codec_laws, compressed
from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding, worst
from shardlib.debug.local import local_gradient, rounded
from shardlib.debug.replay import Buffers
from shardlib.debug.view import StepView
from shardlib.debug.wire import WireExchange
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Collective

_OPS = {Collective.SCATTER: "reduce_scatter", Collective.SUM: "all_reduce"}


def reduction(view: StepView) -> Finding | None:
    """The first thing between the loss and the optimizer's gradients that differs, the backward included."""
    if view.plan.reductions.owner is not None:
        return None
    got = {
        rank: {name: grad.double() * step.scale for name, grad in step.grads.items()}
        for rank, step in view.ranks.items()
        if step.grads
    }
    lossy = {channel.bucket.name for channel in view.plan.channels}
    exact = {rank: {n: g for n, g in grads.items() if n not in lossy} for rank, grads in got.items()}
    _, mean, _ = view.mean
    bad = [
        (bucket, path, (rank, apart))
        for bucket, path, rank, apart, _, _ in view.of_buckets(mean, exact, "optimizer")
        if rounded(apart, bucket).matters
    ]
    if not got:
        bad_leaves = {path for bucket in view.plan.trained for path in bucket.paths}
        return backward(view, bad_leaves) or interrupted(view) or _not_made(view)
    bad_leaves = {path for _, path, _ in bad} | {p for b in view.plan.trained if b.name in lossy for p in b.paths}
    if not bad_leaves:
        return None
    factor = _factor(view, mean, exact) if bad and not lossy else None
    if factor is not None:
        return factor
    if (lossy or bad) and (found := backward(view, bad_leaves)):
        return found
    for bucket in _in_order(view):
        if bucket.name in lossy:
            found = _first_sums(view, bucket) if not bucket.tiles > 1 else None
            found = found or compressed(view, bucket, got)
        else:
            mine = [(path, each) for other, path, each in bad if other.name == bucket.name]
            found = _route(view, bucket, mine) if mine else None
        if found:
            return found
    found = codec_laws(view.plan) if lossy else None
    return found and replace(found, step=view.number)


def _in_order(view: StepView) -> list[Bucket]:
    """The trained buckets, from those that are reduced first."""
    labels = [exchange.about for exchange in view.replay.wire.exchanges if exchange.step == view.number]
    place = {label: position for position, label in reversed(list(enumerate(labels)))}
    trained = view.plan.everywhere.trained
    return sorted(trained, key=lambda bucket: place.get(f"the gradient of {bucket.label}", len(labels)))


def _factor(view: StepView, mean: Mapping[str, torch.Tensor], got: Mapping[int, Buffers]) -> Finding | None:
    """The finding for gradients that are all too large by one factor: not their sums are wrong, but the mean."""
    ratios, largest, ranks = set[float](), 0.0, set[int]()
    for _, _, rank, _, mine, due in view.of_buckets(mean, got, "optimizer"):
        norm = due.double().square().sum()
        if norm == 0:
            continue
        ratio = float((mine.double() * due.double()).sum() / norm)
        left = (mine.double() - ratio * due.double()).norm() / norm.sqrt()
        if left > 1e-6 or not math.isfinite(ratio):
            return None
        ratios.add(ratio)
        ranks.add(rank)
        largest = max(largest, float((mine - due).abs().max()))
    if not ratios or max(ratios) - min(ratios) > 1e-6 * max(map(abs, ratios)):
        return None
    plan, factor = view.plan, sum(ratios) / len(ratios)
    scale = f", loss scale {plan.step.loss_scale.value:g}" if plan.step.loss_scale else ""
    parts = f"{plan.batch_ranks} ranks × {plan.step.microbatches} micro-batches{scale}"
    bad = tuple(sorted(ranks)), Difference(largest, 0.0, largest)
    return view.finding(
        "reduction",
        f"the factor of the mean over {parts}",
        bad,
        note=f"all gradients are {factor:.6g} times what they should be",
    )


def _unpacked(bucket: Bucket, buffer: torch.Tensor, path: str) -> torch.Tensor:
    """A leaf's elements of a whole, rank-major buffer."""
    ways = math.prod(bucket.sizes)
    chunks = [-(-math.prod(shape) // ways) for shape in bucket.shapes]
    position = bucket.paths.index(path)
    start = sum(chunks[:position])
    rows = buffer.reshape(ways, -1)[:, start : start + chunks[position]]
    return rows.reshape(-1)[: math.prod(bucket.shapes[position])].view(bucket.shapes[position])


def _sums_of(view: StepView, bucket: Bucket) -> Iterator[tuple[WireExchange, list[int] | None]]:
    """The first exchanges of a bucket's gradients in the step, with the index of the micro-batch if each has its own."""
    route = view.plan.tiled.routes[bucket.name] if bucket.tiles == 1 else None
    if route is None or not route.reductions:
        return
    first = route.reductions[0]
    if first.channel is not None:
        return
    met: dict[tuple[int, ...], int] = {}
    for exchange in view.replay.wire.exchanges:
        fits = exchange.op == _OPS[first.op] and exchange.axis == first.axis and exchange.step == view.number
        if not fits or exchange.about != f"the gradient of {bucket.label}":
            continue
        if any(sent.numel() != bucket.size(first.source) for sent in exchange.sent.values()):
            continue
        group = tuple(sorted(exchange.members.values()))
        index = met[group] = met.get(group, -1) + 1
        yield exchange, [index] if route.each else None


def _first_sums(view: StepView, bucket: Bucket) -> Finding | None:
    """A gradient that is wrong before its first exchange: in the sum over micro-batches, or in what it is packed into."""
    twins = [b for b in view.plan.trained if b.label == bucket.label and b.size(0) == bucket.size(0)]
    if view.in_parts(bucket) or len(bucket.homes) > 1 or len(twins) > 1:
        return None
    for exchange, which in _sums_of(view, bucket):
        for path in bucket.paths:
            apart = []
            for member, sent in exchange.sent.items():
                rank = exchange.members[member]
                cells = view.cells_of(rank)
                cells = cells if which is None else [cells[which[0] % len(cells)]]
                due = local_gradient(view, rank, path, cells)
                if due is not None:
                    apart.append((rank, rounded(difference(_unpacked(bucket, sent.double(), path), due), bucket)))
            if bad := worst(apart):
                several = view.plan.step.microbatches > 1 and which is None
                what = "the sum over micro-batches of" if several else "the packing of"
                return view.finding(
                    "reduction",
                    f"{what} the gradient of unit {bucket.label}",
                    bad,
                    leaf=path,
                    note=f"before the {exchange.op} over axis {exchange.axis!r}",
                )
    return None


def _route(view: StepView, bucket: Bucket, bad: list[tuple[str, tuple[int, Difference]]]) -> Finding | None:
    """Where along a bucket's route its gradient goes wrong."""
    if found := _first_sums(view, bucket):
        return found
    path = bad[0][0]
    wrong = worst(each for other, each in bad if other == path)
    assert wrong is not None
    about = f"the gradient of {bucket.label}"
    made = [e for e in view.replay.wire.exchanges if e.step == view.number and e.about == about]
    for exchange in made:
        apart = [
            (exchange.members[rank], difference(got.reshape(-1), exchange.due(rank)))
            for rank, got in exchange.got.items()
        ]
        if fault := worst(apart):
            return view.finding("reduction", _exchange_named(exchange.op, exchange.axis, bucket), fault, leaf=path)
    if not_made := _missing(view, bucket, made, path, wrong):
        return not_made
    if len(bucket.homes) > 1:
        what = f"the sum over stages of the gradient of unit {bucket.label}, over axis {view.plan.stages.axis!r}"
    elif not made:
        what = f"the sum over micro-batches of the gradient of unit {bucket.label}"
    else:
        what = f"the sum of the gradient of unit {bucket.label} after its exchanges ({_chain(made)})"
    return view.finding("reduction", what, wrong, leaf=path)


def _not_made(view: StepView) -> Finding | None:
    """An exchange that is missing in a step that ended before its optimizer."""
    never = tuple(sorted(view.ranks)), Difference(float("inf"), 0.0, 0.0)
    for bucket in _in_order(view):
        about = f"the gradient of {bucket.label}"
        made = [e for e in view.replay.wire.exchanges if e.step == view.number and e.about == about]
        if found := _missing(view, bucket, made, bucket.paths[0], never):
            return found
    return None


def _missing(
    view: StepView, bucket: Bucket, made: list[WireExchange], path: str, wrong: tuple[tuple[int, ...], Difference]
) -> Finding | None:
    """An exchange that the plan has, or that it lacks, and that was not made."""
    route = view.plan.routes[bucket.name].reductions
    times = {(_OPS[each.op], each.axis) for each in route if each.channel is None}
    missing = [key for key in times if not any((e.op, e.axis) == key for e in made)]
    if missing:
        op, axis = missing[0]
        return view.finding(
            "reduction",
            _exchange_named(op, axis, bucket),
            wrong,
            leaf=path,
            note="the plan has it, and it was not made",
        )
    compressed = {each.axis for each in route if each.channel is not None}
    needed = [
        axis for axis in _summing_axes(view, bucket) if axis not in compressed and not any(e.axis == axis for e in made)
    ]
    if needed:
        return view.finding(
            "reduction",
            _exchange_named("all_reduce", needed[0], bucket),
            wrong,
            leaf=path,
            note="ranks along this axis have parts of the gradient, and the plan does not sum them",
        )
    return None


def _summing_axes(view: StepView, bucket: Bucket) -> list[str]:
    """Axes over which a bucket's gradients are to be summed: of the batch, of sequence parts, of slices that share a leaf."""
    spec = {axis for path in bucket.paths for axis in view.plan.placement_of[path].compute.spec.axes}
    sequence = view.plan.step.sequence
    shared = [
        placed.style.axis
        for path in bucket.paths
        if (placed := view.plan.placement_of[path]).style and placed.style.sums
    ]
    axes = dict.fromkeys([*view.plan.batch_axes, *([sequence.axis] if sequence else []), *shared])
    return [axis for axis in axes if view.plan.sizes[axis] > 1 and axis not in spec]


def _chain(made: list[WireExchange]) -> str:
    return ", ".join(dict.fromkeys(f"{exchange.op} over axis {exchange.axis!r}" for exchange in made))


def _exchange_named(op: str, axis: str, bucket: Bucket) -> str:
    return f"the {op} of the gradient of unit {bucket.label} over axis {axis!r}"

"""The sums of gradients: over micro-batches, then exchange by exchange along each bucket's route."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from shardlib.debug.calls import backward, interrupted
from shardlib.debug.codec_laws import codec_laws
from shardlib.debug.finding import FLOOR, Difference, Finding, difference, tolerance, worst
from shardlib.debug.layout import slice_of
from shardlib.debug.replay import Buffers, WireExchange
from shardlib.debug.view import Bad, StepView
from shardlib.mesh.mesh import axis_groups
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel, Collective

_OPS = {Collective.SCATTER: "reduce_scatter", Collective.SUM: "all_reduce"}
_NOISE = 10  # times the part of a sum that is no multiple of the right one, up to which its factor may be another


def reduction(view: StepView) -> Finding | None:
    """The first thing between the loss and the optimizer's gradients that differs, the backward included."""
    plan = view.plan
    if plan.reductions.owner is not None:
        return None
    if not view.grads:
        bad_leaves = {path for bucket in plan.trained for path in bucket.paths}
        return backward(view, bad_leaves) or interrupted(view) or _not_made(view)
    lossy = {channel.bucket.name for channel in plan.channels}
    exact = {rank: {n: g for n, g in grads.items() if n not in lossy} for rank, grads in view.grads.items()}
    bad = [
        (bucket, path, (rank, apart))
        for bucket, path, rank, apart, _, _ in view.of_buckets(view.mean[1], exact, "optimizer")
        if _rounded(apart, bucket).matters
    ]
    bad_leaves = {path for _, path, _ in bad} | {p for b in plan.trained if b.name in lossy for p in b.paths}
    if not bad_leaves:
        return None
    if found := (_factor(view, exact) if bad and not lossy else None) or backward(view, bad_leaves):
        return found
    for bucket in _in_order(view):
        if bucket.name in lossy:
            found = (None if bucket.tiles > 1 else _first_sums(view, bucket)) or _compressed(view, bucket)
        else:
            mine = [(path, each) for other, path, each in bad if other.name == bucket.name]
            found = _route(view, bucket, mine) if mine else None
        if found:
            return found
    found = codec_laws(plan) if lossy else None
    return found and replace(found, step=view.number)


def _rounded(apart: Difference, bucket: Bucket) -> Difference:
    """A difference of gradients that were computed and summed in the bucket's dtypes."""
    share = max(tolerance(bucket.dtype), tolerance(bucket.reduce_dtype))
    return apart._replace(limit=max(apart.limit, share * (apart.largest + FLOOR)))


def _in_order(view: StepView) -> list[Bucket]:
    """The trained buckets, from those that are reduced first."""
    labels = [exchange.about for exchange in view.replay.exchanges.values() if exchange.step == view.number]
    place = {label: position for position, label in reversed(list(enumerate(labels)))}
    trained = view.plan.everywhere.trained
    return sorted(trained, key=lambda bucket: place.get(f"the gradient of {bucket.label}", len(labels)))


def _made(view: StepView, bucket: Bucket) -> list[WireExchange]:
    """The exchanges of a bucket's gradients in the step."""
    about = f"the gradient of {bucket.label}"
    return [e for e in view.replay.exchanges.values() if e.step == view.number and e.about == about]


def _factor(view: StepView, got: dict[int, Buffers]) -> Finding | None:
    """The finding for gradients that are all too large by one factor: not their sums are wrong, but the mean."""
    ratios, largest, ranks = set[float](), 0.0, set[int]()
    for _, _, rank, _, mine, due in view.of_buckets(view.mean[1], got, "optimizer"):
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
    what = f"the factor of the mean over {plan.batch_ranks} ranks × {plan.step.microbatches} micro-batches{scale}"
    bad = tuple(sorted(ranks)), Difference(largest, 0.0, largest)
    return view.finding("reduction", what, bad, note=f"all gradients are {factor:.6g} times what they should be")


# A rank's own gradients on one device, before they are summed over ranks.


def _chunks(bucket: Bucket) -> list[int]:
    """A rank's elements of each leaf of a bucket, padding included."""
    return [-(-math.prod(shape) // math.prod(bucket.sizes)) for shape in bucket.shapes]


def _own(view: StepView, bucket: Bucket, rank: int, cells: Sequence[int]) -> list[torch.Tensor] | None:
    """A rank's part of each leaf's gradient from some micro-batches, flat, in the scale of its backward; None if it is not
    known."""
    seeds, found = [view.seed(cell) for cell in cells], []
    for path in bucket.paths:
        placed = view.plan.placement_of[path].compute
        total = torch.zeros(placed.shape, dtype=torch.float64)
        for cell, seed in zip(cells, seeds):
            if seed is None:
                return None
            total += view.evaluated[cell].grads[path].double() * seed
        found.append(slice_of(total, placed.spec, view.plan.sizes, view.coords(rank)).reshape(-1))
    return found


def _first_sums(view: StepView, bucket: Bucket) -> Finding | None:
    """A gradient that is wrong before its first exchange: in the sum over micro-batches, or in what it is packed into."""
    twins = [b for b in view.plan.trained if b.label == bucket.label and b.size(0) == bucket.size(0)]
    if view.in_parts(bucket) or len(bucket.homes) > 1 or len(twins) > 1:
        return None
    for exchange, index in _first_exchanges(view, bucket):
        apart: list[list[tuple[int, Difference]]] = [[] for _ in bucket.paths]
        for member, sent in exchange.sent.items():
            rank = exchange.members[member]
            cells = view.cells_of(rank)
            own = _own(view, bucket, rank, cells if index is None else [cells[index % len(cells)]])
            packed = sent.double().reshape(math.prod(bucket.sizes), -1).split(_chunks(bucket), 1)
            for leaf, mine, due in zip(apart, packed, own or ()):
                leaf.append((rank, _rounded(difference(mine.reshape(-1)[: due.numel()], due), bucket)))
        for path, leaf in zip(bucket.paths, apart):
            if bad := worst(leaf):
                several = view.plan.step.microbatches > 1 and index is None
                what = (
                    f"the {'sum over micro-batches' if several else 'packing'} of the gradient of unit {bucket.label}"
                )
                before = f"before the {exchange.op} over axis {exchange.axis!r}"
                return view.finding("reduction", what, bad, leaf=path, note=before)
    return None


def _first_exchanges(view: StepView, bucket: Bucket) -> Iterator[tuple[WireExchange, int | None]]:
    """The first exchanges of a bucket's gradients in the step, with the index of the micro-batch if each has its own."""
    route = view.plan.tiled.routes[bucket.name] if bucket.tiles == 1 else None
    if route is None or not route.reductions or route.reductions[0].channel is not None:
        return
    first, met = route.reductions[0], dict[tuple[int, ...], int]()
    for exchange in _made(view, bucket):
        sizes = {sent.numel() for sent in exchange.sent.values()}
        if (exchange.op, exchange.axis) == (_OPS[first.op], first.axis) and sizes == {bucket.size(first.source)}:
            group = tuple(sorted(exchange.members.values()))
            met[group] = met.get(group, -1) + 1
            yield exchange, met[group] if route.each else None


def _route(view: StepView, bucket: Bucket, bad: list[tuple[str, tuple[int, Difference]]]) -> Finding | None:
    """Where along a bucket's route its gradient goes wrong."""
    if found := _first_sums(view, bucket):
        return found
    path = bad[0][0]
    wrong = worst(each for other, each in bad if other == path)
    assert wrong is not None
    made = _made(view, bucket)
    for e in made:
        if fault := worst((e.members[rank], difference(got.reshape(-1), e.due(rank))) for rank, got in e.got.items()):
            return view.finding("reduction", _exchange_named(e.op, e.axis, bucket), fault, leaf=path)
    if not_made := _missing(view, bucket, made, path, wrong):
        return not_made
    if len(bucket.homes) > 1:
        what = f"the sum over stages of the gradient of unit {bucket.label}, over axis {view.plan.stages.axis!r}"
    elif not made:
        what = f"the sum over micro-batches of the gradient of unit {bucket.label}"
    else:
        chain = ", ".join(dict.fromkeys(f"{exchange.op} over axis {exchange.axis!r}" for exchange in made))
        what = f"the sum of the gradient of unit {bucket.label} after its exchanges ({chain})"
    return view.finding("reduction", what, wrong, leaf=path)


def _not_made(view: StepView) -> Finding | None:
    """An exchange that is missing in a step that ended before its optimizer."""
    never = tuple(sorted(view.ranks)), Difference(float("inf"), 0.0, 0.0)
    found = (_missing(view, bucket, _made(view, bucket), bucket.paths[0], never) for bucket in _in_order(view))
    return next((each for each in found if each), None)


def _missing(view: StepView, bucket: Bucket, made: list[WireExchange], path: str, wrong: Bad) -> Finding | None:
    """An exchange that the plan has, or that it lacks, and that was not made."""
    route = view.plan.routes[bucket.name].reductions
    times = dict.fromkeys((_OPS[each.op], each.axis) for each in route if each.channel is None)
    there = {(e.op, e.axis) for e in made}
    missing, note = [key for key in times if key not in there], "the plan has it, and it was not made"
    if not missing:
        met = {e.axis for e in made} | {each.axis for each in route if each.channel is not None}
        missing = [("all_reduce", axis) for axis in _summing_axes(view, bucket) if axis not in met]
        note = "ranks along this axis have parts of the gradient, and the plan does not sum them"
    if not missing:
        return None
    return view.finding("reduction", _exchange_named(*missing[0], bucket), wrong, leaf=path, note=note)


def _summing_axes(view: StepView, bucket: Bucket) -> list[str]:
    """Axes over which a bucket's gradients are to be summed: of the batch, of sequence parts, of slices that share a leaf."""
    placed, sequence = [view.plan.placement_of[path] for path in bucket.paths], view.plan.step.sequence
    spec = {axis for each in placed for axis in each.compute.spec.axes}
    shared = [each.style.axis for each in placed if each.style and each.style.sums]
    axes = dict.fromkeys([*view.plan.batch_axes, *([sequence.axis] if sequence else []), *shared])
    return [axis for axis in axes if view.plan.sizes[axis] > 1 and axis not in spec]


def _exchange_named(op: str, axis: str, bucket: Bucket) -> str:
    return f"the {op} of the gradient of unit {bucket.label} over axis {axis!r}"


# Sums in few bits: nothing may be lost but what is kept for the next step.


def _compressed(view: StepView, bucket: Bucket) -> Finding | None:
    """A compressed sum that loses something: what goes in is what comes out and what is kept for the next step.

    Sums over several axes are checked as far as each is exact.
    """
    channels = [channel for channel in view.plan.channels if channel.bucket.name == bucket.name]
    shared = view.in_parts(bucket) or len(bucket.homes) > 1
    if len(channels) != 1 or len(view.plan.routes[bucket.name].reductions) != 1 or shared:
        return None
    (channel,) = channels
    for group in axis_groups(view.plan.sizes, channel.axis):
        if not all(rank in view.grads for rank in group) or (balance := _balance(view, channel, group)) is None:
            continue
        entered, left = balance
        lost = entered - left
        if any(kept.residual for kept in channel.keeps.values()):
            apart = difference(lost, torch.zeros_like(lost))._replace(largest=float(entered.abs().max()))
            apart, note = _rounded(apart, bucket), "what is sent and what is kept do not add up to the gradients"
        else:
            apart, note = _without_residual(entered, left, bucket)
        if apart.matters:
            what = f"the sum of the gradient of unit {bucket.label} over axis {channel.axis!r} in {channel.codec}"
            leaf = _leaf_at(channel, int(lost.abs().argmax()))
            return view.finding("reduction", what, (tuple(group), apart), leaf=leaf, note=note)
    return None


def _without_residual(wanted: torch.Tensor, found: torch.Tensor, bucket: Bucket) -> tuple[Difference, str]:
    """The error of a sum that may lose what it cannot hold: it has no other factor than its noise explains."""
    norm = max(float(wanted.norm()), FLOOR)
    factor = float((found * wanted).sum()) / norm**2
    noise = float((found - factor * wanted).norm())
    limit = max(_NOISE * noise, tolerance(bucket.reduce_dtype) * norm)
    return Difference(abs(factor - 1) * norm, limit, norm), f"it is {factor:.3g} times the sum of what the ranks send"


def _balance(view: StepView, channel: Channel, group: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What enters a sum, gradients and residuals; and what leaves it, the sum and residuals. Of the padded buffer."""
    bucket, scattered, summands = channel.bucket, channel.level is not None, []
    ways = math.prod(bucket.sizes)
    for rank in group:
        own = _own(view, bucket, rank, view.cells_of(rank))
        if own is None:
            return None
        rows = [F.pad(leaf, (0, n * ways - leaf.numel())).view(ways, n) for leaf, n in zip(own, _chunks(bucket))]
        summands.append(torch.cat(rows, 1).reshape(-1))  # rank-major
    entered, sums = _added(summands), [view.ranks[rank].grads[bucket.name].double() for rank in group]
    left = torch.cat(sums) if scattered else sums[0]
    residuals = {name: kept for name, kept in channel.keeps.items() if kept.residual}
    size = next((kept.elements for kept in residuals.values() if not kept.by_row), entered.numel())
    entered, left = (_padded(buffer, channel.ways, size, scattered) for buffer in (entered, left))
    for name, kept in residuals.items():
        before, after = ([view.ranks[rank].comm[when][name].double() for rank in group] for when in (0, 1))
        join = torch.cat if kept.by_row else _added
        entered, left = entered + join(before), left + join(after)
    return entered, left


def _added(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def _padded(buffer: torch.Tensor, ways: int, size: int, scattered: bool) -> torch.Tensor:
    """A buffer as the codec pads it: every row of it, if rows are scattered, or else its end."""
    rows = buffer.view(ways if scattered else 1, -1)
    return F.pad(rows, (0, size // len(rows) - rows.shape[1])).reshape(-1)


def _leaf_at(channel: Channel, position: int) -> str:
    """The leaf that an element of the exchanged buffer belongs to."""
    within = position % max(channel.elements // (channel.ways if channel.level is not None else 1), 1)
    for path, chunk in zip(channel.bucket.paths, _chunks(channel.bucket)):
        if within < chunk:
            return path
        within -= chunk
    return channel.bucket.paths[-1]

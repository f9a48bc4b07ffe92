"""The sums of gradients: over micro-batches, then exchange by exchange along each bucket's route."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from shardlib.debug.backward import backward, seed_of
from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding, worst
from shardlib.debug.layout import number, slice_of
from shardlib.debug.view import StepView
from shardlib.debug.wire import Exchange
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel
from shardlib.plan.exchanges import Op

_OPS = {Op.SCATTER: "reduce_scatter", Op.SUM: "all_reduce"}
_LOOSE = 0.5  # of a sum's norm, up to which a codec that keeps no residual may miss it


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
        if _rounded(apart, bucket).matters
    ]
    if not got:
        bad_leaves = {path for bucket in view.plan.trained for path in bucket.paths}
        return backward(view, bad_leaves)
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
            found = found or _compressed(view, bucket, got)
        else:
            mine = [(path, each) for other, path, each in bad if other.name == bucket.name]
            found = _route(view, bucket, mine) if mine else None
        if found:
            return found
    return None


def _rounded(apart: Difference, bucket: Bucket) -> Difference:
    """A difference of gradients that were summed in the bucket's dtype."""
    from shardlib.debug.difference import tolerance

    return apart._replace(limit=max(apart.limit, tolerance(bucket.reduce_dtype) * (apart.largest + 1e-5)))


def _in_order(view: StepView) -> list[Bucket]:
    """The trained buckets, from those that are reduced first."""
    labels = [exchange.about for exchange in view.replay.wire.exchanges if exchange.step == view.number]
    place = {label: position for position, label in reversed(list(enumerate(labels)))}
    trained = view.plan.everywhere.trained
    return sorted(trained, key=lambda bucket: place.get(f"the gradient of {bucket.label}", len(labels)))


def _factor(view: StepView, mean: dict, got: dict) -> Finding | None:
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


def _local(view: StepView, rank: int, path: str, cells: list[int]) -> torch.Tensor | None:
    """A rank's part of a leaf's gradient from some micro-batches, in the scale of its backward; None if it is not known."""
    placed = view.plan.placement_of[path]
    seeds = [seed_of(view, cell) for cell in cells]
    if any(seed is None for seed in seeds):
        return None
    total = sum(view.evaluated[cell].grads[path].double() * seed for cell, seed in zip(cells, seeds))
    assert isinstance(total, torch.Tensor)
    return slice_of(total, placed.compute.spec, view.plan.sizes, view.coords(rank))


def _cells_of(view: StepView, rank: int) -> list[int]:
    share = number(view.plan.batch_axes, view.plan.sizes, view.coords(rank))
    return [share * view.plan.step.microbatches + index for index in range(view.plan.step.microbatches)]


def _unpacked(bucket: Bucket, buffer: torch.Tensor, path: str) -> torch.Tensor:
    """A leaf's elements of a whole, rank-major buffer."""
    ways = math.prod(bucket.sizes)
    chunks = [-(-math.prod(shape) // ways) for shape in bucket.shapes]
    position = bucket.paths.index(path)
    start = sum(chunks[:position])
    rows = buffer.reshape(ways, -1)[:, start : start + chunks[position]]
    return rows.reshape(-1)[: math.prod(bucket.shapes[position])].view(bucket.shapes[position])


def _partial(view: StepView, bucket: Bucket) -> bool:
    """Whether a rank's own part of the gradient cannot be told from one device: several ranks make it together."""
    inner = {axis for axis, size in view.plan.sizes.items() if size > 1}
    inner -= {*view.plan.batch_axes, *view.plan.stages.axes}
    return bool(inner & {*bucket.axes, *bucket.replicas}) or len(bucket.homes) > 1


def _sums_of(view: StepView, bucket: Bucket) -> Iterator[tuple[Exchange, list[int] | None]]:
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
    if _partial(view, bucket) or len(twins) > 1:
        return None
    for exchange, which in _sums_of(view, bucket):
        for path in bucket.paths:
            apart = []
            for member, sent in exchange.sent.items():
                rank = exchange.members[member]
                cells = _cells_of(view, rank)
                cells = cells if which is None else [cells[which[0] % len(cells)]]
                due = _local(view, rank, path, cells)
                if due is not None:
                    apart.append((rank, _rounded(difference(_unpacked(bucket, sent.double(), path), due), bucket)))
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
    route = view.plan.routes[bucket.name].reductions
    times = {(_OPS[each.op], each.axis) for each in route}
    missing = [key for key in times if not any((e.op, e.axis) == key for e in made)]
    if missing:
        op, axis = missing[0]
        return view.finding(
            "reduction", _exchange_named(op, axis, bucket), wrong, leaf=path, note="the plan has it, and it was not made"
        )
    needed = [axis for axis in _summing_axes(view, bucket) if not any(e.axis == axis for e in made)]
    if needed:
        return view.finding(
            "reduction",
            _exchange_named("all_reduce", needed[0], bucket),
            wrong,
            leaf=path,
            note="ranks along this axis have parts of the gradient, and the plan does not sum them",
        )
    if len(bucket.homes) > 1:
        what = f"the sum over stages of the gradient of unit {bucket.label}, over axis {view.plan.stages.axis!r}"
    elif not made:
        what = f"the sum over micro-batches of the gradient of unit {bucket.label}"
    else:
        what = f"the sum of the gradient of unit {bucket.label} after its exchanges ({_chain(made)})"
    return view.finding("reduction", what, wrong, leaf=path)


def _summing_axes(view: StepView, bucket: Bucket) -> list[str]:
    """Axes over which a bucket's gradients are to be summed: where the batch varies, or the parts of a sequence."""
    spec = {axis for path in bucket.paths for axis in view.plan.placement_of[path].compute.spec.axes}
    sequence = view.plan.step.sequence
    axes = [*view.plan.batch_axes, *([sequence.axis] if sequence else [])]
    return [axis for axis in axes if view.plan.sizes[axis] > 1 and axis not in spec]


def _chain(made: list[Exchange]) -> str:
    return ", ".join(dict.fromkeys(f"{exchange.op} over axis {exchange.axis!r}" for exchange in made))


def _exchange_named(op: str, axis: str, bucket: Bucket) -> str:
    return f"the {op} of the gradient of unit {bucket.label} over axis {axis!r}"


def _compressed(view: StepView, bucket: Bucket, got: dict) -> Finding | None:
    """A compressed sum that loses something: what goes in is what comes out and what is kept for the next step."""
    (channel, *others) = [c for c in view.plan.channels if c.bucket.name == bucket.name]
    route = view.plan.routes[bucket.name].reductions
    if others or len(route) != 1 or view.plan.step.microbatches > 1 and route[0] in view.plan.routes[bucket.name].each:
        return None  # sums of several exchanges are checked as far as each is exact
    for group in _groups(view, channel.axis):
        if not all(rank in got for rank in group):
            continue
        left = _lost(view, channel, group, got)
        if left is None:
            continue
        lost, total = left
        keeps = any(kept.residual for kept in channel.keeps.values())
        if keeps:
            apart = difference(lost, torch.zeros_like(lost), channel.dtype)
            largest = float(total.abs().max()) if total.numel() else 0.0
            from shardlib.debug.difference import tolerance

            apart = apart._replace(limit=tolerance(channel.dtype) * (largest + 1e-5), largest=largest)
            what = "what is sent and what is kept for the next step do not add up to the gradients"
        else:
            apart = Difference(float(lost.norm()), _LOOSE * float(total.norm()), float(total.norm()))
            what = "without a residual a sum may miss half of its norm, and this one misses more"
        if apart.matters:
            position = int(lost.abs().argmax())
            return view.finding(
                "reduction",
                f"the sum of the gradient of unit {bucket.label} over axis {channel.axis!r} in {channel.codec}",
                (tuple(group), apart),
                leaf=_leaf_at(channel, position),
                note=what,
            )
    return None


def _groups(view: StepView, axis: str) -> list[list[int]]:
    groups: dict[tuple, list[int]] = {}
    for rank in view.replay.steps:
        coords = view.coords(rank)
        groups.setdefault(tuple(c for a, c in coords.items() if a != axis), []).append(rank)
    return list(groups.values())


def _lost(
    view: StepView, channel: Channel, group: list[int], got: dict
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Σ gradients + Σ residuals before − sum − Σ residuals after, of the padded buffer; and the first two sums alone."""
    bucket, ways = channel.bucket, channel.ways
    total, kept_before, kept_after, rows_out = None, 0.0, 0.0, []
    for rank in group:
        level = bucket.levels if channel.level is None else channel.level
        columns = []
        for path in bucket.paths:
            local = _local(view, rank, path, _cells_of(view, rank))
            if local is None or _partial(view, bucket):
                return None
            flat = local.reshape(-1)
            owners = math.prod(bucket.sizes)
            chunk = -(-flat.numel() // owners)
            columns.append(F.pad(flat, (0, chunk * owners - flat.numel())).view(owners, chunk))
        whole = torch.cat(columns, 1).reshape(-1) if level == 0 and bucket.levels else torch.cat(columns, 1).reshape(-1)
        total = whole if total is None else total + whole
        rows_out.append(view.ranks[rank].grads[bucket.name].double())
    assert total is not None
    scattered = channel.level is not None
    out = torch.cat(rows_out) if scattered else rows_out[0]
    size = next((k.elements for k in channel.keeps.values() if k.residual and not k.by_row), total.numel())
    total, out = (_padded(x, ways, size, scattered) for x in (total, out))
    for name, kept in channel.keeps.items():
        if not kept.residual:
            continue
        before, after = (
            [view.ranks[rank].comm[when][name].double() for rank in group] for when in (0, 1)
        )
        join = torch.cat if kept.by_row else sum
        kept_before, kept_after = kept_before + join(before), kept_after + join(after)
    entered = total + kept_before
    return entered - out - kept_after, entered


def _padded(x: torch.Tensor, ways: int, size: int, scattered: bool) -> torch.Tensor:
    if x.numel() == size:
        return x
    if scattered:
        rows = x.view(ways, -1)
        return F.pad(rows, (0, size // ways - rows.shape[1])).reshape(-1)
    return F.pad(x, (0, size - x.numel()))


def _leaf_at(channel: Channel, position: int) -> str:
    """The leaf that an element of the exchanged buffer belongs to."""
    bucket = channel.bucket
    within = position % max(channel.elements // (channel.ways if channel.level is not None else 1), 1)
    chunks = [-(-math.prod(shape) // math.prod(bucket.sizes)) for shape in bucket.shapes]
    for path, chunk in zip(bucket.paths, chunks):
        if within < chunk:
            return path
        within -= chunk
    return bucket.paths[-1]

"""The loss function beside one device: what it is given, what its calls compute, and their gradients from the last call to
the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from shardlib.debug.finding import Difference, Finding, difference, worst
from shardlib.debug.layout import shards, slice_of
from shardlib.debug.view import Bad, StepView, known
from shardlib.debug.watching import NotedCall
from shardlib.plan.buckets import Bucket
from shardlib.tree import tensors_of

_ALL = Difference(float("inf"), 0.0, 0.0)


def placing(view: StepView) -> Finding | None:
    """A parameter that is not where the plan says, before the first step."""
    found = view.first_leaf(view.device.used(), view.replay.start, "param") if view.number == 0 else None
    if found is None:
        return None
    _, path, bad = found
    spec = view.plan.placement_of[path].param.spec
    return view.finding("placing", f"the shards of parameters, by {spec!r}", bad, leaf=path)


def forward(view: StepView) -> Finding | None:
    """The first thing in the forward that differs."""
    cells = range(len(view.evaluated))
    return (
        _first(_batch(view, cell) or _key(view, cell) for cell in cells)
        or _gathers(view)
        or _first(_parameters(view, cell) or _values(view, cell) for cell in cells)
    )


def _first(found: Iterable[Finding | None]) -> Finding | None:
    return next((each for each in found if each), None)


def _batch(view: StepView, cell: int) -> Finding | None:
    wanted = tensors_of(view.microbatches[cell])
    bad = worst(
        (rank, difference(mine, due))
        for rank, run in view.each_run(cell)
        for mine, due in zip(run.batch, wanted, strict=True)
    )
    return bad and view.finding("forward", "the micro-batch that the loss function is given", bad, microbatch=cell)


def _key(view: StepView, cell: int) -> Finding | None:
    wanted = view.device.key(view.number, cell)
    others = {rank: run.key for rank, run in view.each_run(cell) if run.key is not None and run.key != wanted}
    if not others or wanted is None:
        return None
    key = next(iter(others.values()))
    what = "seed" if key.seed != wanted.seed else "slot"
    note = f"its {what} is {getattr(key, what)}, and should be {getattr(wanted, what)}"
    bad = tuple(sorted(others)), _ALL
    return view.finding("forward", "the random key of the micro-batch", bad, microbatch=cell, note=note)


def gather_named(bucket: Bucket) -> str:
    """The gather of a bucket's unit, in words."""
    axes = " and ".join(map(repr, bucket.axes[: bucket.param_level]))
    return (
        f"the gather of unit {bucket.label} over axis {axes}" if axes else f"the use of unit {bucket.label} as stored"
    )


def _gathers(view: StepView) -> Finding | None:
    """An all-gather in which a rank sends other values than its shard."""
    if view.plan.reductions.packings:
        return None
    now, units = view.device.used(), dict[str, list[Bucket]]()
    for bucket in view.plan.tiled.buckets:
        if bucket.tiles == 1 and bucket.home is None and bucket.param_level:
            units.setdefault(bucket.label, []).append(bucket)
    for exchange in view.replay.exchanges.values():
        if exchange.op != "all_gather" or exchange.step != view.number or exchange.about not in units:
            continue
        buckets = units[exchange.about]
        sent = ((exchange.members[number], each) for number, each in exchange.sent.items())
        if bad := worst(known((rank, _nearest(view, buckets, each, rank, now)) for rank, each in sent)):
            note = "what is sent is not the rank's shard of this step"
            return view.finding("forward", gather_named(buckets[0]), bad, note=note)
    return None


def _nearest(
    view: StepView, buckets: list[Bucket], sent: torch.Tensor, rank: int, now: dict[str, torch.Tensor]
) -> Difference | None:
    """The difference of what a rank sends from its shard, of the buckets of that size the nearest one's."""
    coords = view.coords(rank)
    dues = (
        torch.cat([shard for _, shard in shards(view.plan, bucket, now, coords, level)])
        for bucket in buckets
        for level in range(1, bucket.param_level + 1)
        if bucket.size(level) == sent.numel()
    )
    found = (difference(sent.reshape(-1), due) for due in dues)
    return min(found, key=lambda each: each.error, default=None)


def _parameters(view: StepView, cell: int) -> Finding | None:
    """A parameter that a block is given with other values than the state's."""
    now, placed = view.device.used(), view.plan.placement_of
    given = (
        (rank, block.name, path, value)
        for rank, run in view.each_run(cell)
        for block in run.blocks.values()
        for path, value in block.params.items()
    )
    for rank, block, path, value in given if not view.plan.reductions.packings else ():
        if path in placed and value.shape == now[path].shape and (bad := worst([(rank, difference(value, now[path]))])):
            what = gather_named(view.plan.bucket_of[placed[path].bucket])
            return view.finding("forward", what, bad, microbatch=cell, leaf=path, block=block)
    return None


def _values(view: StepView, cell: int) -> Finding | None:
    """The first call whose values differ, in the first block whose outputs do."""
    wanted, start = view.evaluated[cell].run, 0
    for number, block in wanted.blocks.items():
        stop = max((n for n, call in enumerate(wanted.calls) if call.block == number), default=start - 1) + 1
        outputs = ((r, run.blocks[number].outputs) for r, run in view.each_run(cell) if number in run.blocks)
        if bad := worst(known((rank, view.apart(rank, mine, block.outputs)) for rank, mine in outputs)):
            return _within(view, cell, range(start, stop)) or view.finding(
                "forward", f"the output of block {block.name}", bad, microbatch=cell, block=block.name
            )
        start = stop
    totals = ((rank, run.total) for rank, run in view.each_run(cell) if run.total is not None)
    bad = None if wanted.total is None else worst((rank, difference(mine, wanted.total)) for rank, mine in totals)
    if bad is None:
        return None
    return _within(view, cell, range(start, len(wanted.calls))) or view.finding(
        "forward", "the loss", bad, microbatch=cell
    )


def _within(view: StepView, cell: int, numbers: range) -> Finding | None:
    """The first of these calls whose values differ."""
    wanted, aligned = view.evaluated[cell].run, view.aligned(cell)
    for number in numbers:
        call = wanted.calls[number]
        if bad := view.worst_call(_made(aligned, number), call):
            leaf = call.paths[0] if call.paths else ""
            return view.call_finding("forward", call.label, bad, cell, call, _how(view, leaf), leaf)
    return None


def _made(aligned: Mapping[int, Mapping[int, NotedCall]], number: int) -> dict[int, NotedCall]:
    """Rank -> a call, for the ranks that make it."""
    return {rank: calls[number] for rank, calls in aligned.items() if number in calls}


def _how(view: StepView, leaf: str) -> str:
    """How the plan places a leaf, where it does not lie whole on every rank."""
    placement = view.plan.placement_of.get(leaf)
    if placement is None:
        return ""
    said = [f"style {placement.style} over {placement.compute.spec!r}"] * (placement.style is not None)
    said += [f"stored as {placement.param.spec!r}"] * bool(placement.param.spec.axes)
    return "; ".join(said)


def backward(view: StepView, bad_leaves: Iterable[str]) -> Finding | None:
    """The first thing in backward that differs, in its order: recomputed values, gradients from the last call to the first,
    and those of leaves.

    Args:
        bad_leaves: leaves whose gradients differ when all is done. A gradient inside the loss function that differs counts if
            one of them is computed from it: ranks may rightly hold parts of a sum.
    """
    bad, cells = set(bad_leaves), list(reversed(range(len(view.evaluated))))
    return _first(_recomputed(view, cell) or _gradients(view, cell, bad) for cell in cells) or _first(
        _leaves(view, cell, bad) for cell in cells
    )


def _recomputed(view: StepView, cell: int) -> Finding | None:
    """A recomputation that gives other values than the forward of the same rank."""
    for rank, run in view.each_run(cell):
        for number, block in run.blocks.items():
            first = [call for call in run.calls if call.block == number]
            for before, after in (pair for again in block.again for pair in _alike(first, again)):
                if bad := worst((rank, difference(b, a)) for b, a in zip(after.values, before.values)):
                    what = f"the recomputation of {before.label}"
                    return view.finding("backward", what, bad, microbatch=cell, block=block.name, where=before.where)
    return None


def _alike(first: list[NotedCall], again: list[NotedCall]) -> Iterator[tuple[NotedCall, NotedCall]]:
    """Calls and their repetitions, as far as they have the same names."""
    for before, after in zip(first, again):
        if before.name != after.name:
            return
        yield before, after


def _gradients(view: StepView, cell: int, bad_leaves: set[str]) -> Finding | None:
    wanted, aligned, seed = view.evaluated[cell].run, view.aligned(cell), view.seed(cell)
    if seed is None:
        return None
    uses: dict[str, int] = {}
    for number, call in enumerate(wanted.calls):
        for path in call.paths:
            uses.setdefault(path, number)
    for number, call in reversed(list(enumerate(wanted.calls))):
        if not any(uses.get(path, number + 1) <= number for path in bad_leaves):
            continue
        made = _made(aligned, number)
        # A rank may hold other values than its part of one device's, such as rows in the order of their experts. (The forward
        # has been compared, so that what is computed from them is right.)
        values = {rank: view.apart(rank, mine.values, call.values) for rank, mine in made.items()}
        alike = {rank: made[rank] for rank, apart in known(values.items()) if not apart.matters}
        bad = view.worst_call(alike, call, grads=True, seed=seed)
        if bad and not _sums_to(call, list(made.values()), seed):
            return _through(view, cell, number, bad)
    return None


def _sums_to(wanted: NotedCall, calls: list[NotedCall], seed: float) -> bool:
    """Whether ranks that work on one micro-batch have parts of the gradient of what is computed from parameters alone."""
    if not wanted.paths or wanted.before:
        return False
    for position, due in enumerate(wanted.grads):
        parts = [call.grads[position] for call in calls]
        if due is None or any(part is None or part.shape != due.shape for part in parts):
            return False
        whole = torch.stack([part.double() for part in parts if part is not None]).sum(0)
        if difference(whole, due.double() * seed, due.dtype).matters:
            return False
    return True


def _through(view: StepView, cell: int, number: int, bad: Bad) -> Finding:
    """The finding for a result whose gradient differs, while the gradients of all that is computed from it do not."""
    calls = view.evaluated[cell].run.calls
    users = [call for call in calls if number in call.before] or [calls[number]]
    operation = f"backward of {' and of '.join(dict.fromkeys(user.label for user in users))}"
    leaf = next((path for user in users for path in user.paths), "")
    note = "; ".join(filter(None, [f"it gives the gradient of what {calls[number].label} returns", _how(view, leaf)]))
    return view.call_finding("backward", operation, bad, cell, users[0], note, leaf)


def _leaves(view: StepView, cell: int, bad_leaves: set[str]) -> Finding | None:
    """A leaf whose gradient from one micro-batch differs, before it is summed with anything."""
    wanted, seed, placed = view.evaluated[cell], view.seed(cell), view.plan.placement_of
    if seed is None or view.plan.stages.axes:
        return None
    for path in bad_leaves:
        spec = placed[path].compute.spec
        users = [call for call in wanted.run.calls if path in call.paths]
        shared = placed[path].style is not None or spec.axes
        if not users or shared or view.in_parts(view.plan.bucket_of[placed[path].bucket]):
            continue
        apart = []
        for rank, runs in view.runs(cell).items():
            if grads := [run.leaf_grads[path] for run in runs if path in run.leaf_grads]:
                due = slice_of(wanted.grads[path] * seed, spec, view.plan.sizes, view.coords(rank))
                apart.append((rank, difference(torch.stack(grads).sum(0), due)))
        if bad := worst(apart):
            what, note = f"backward of {users[0].label}", "the parameter's own gradient differs"
            return view.call_finding("backward", what, bad, cell, users[0], note, path)
    return None


def interrupted(view: StepView) -> Finding | None:
    """The call whose forward or backward a step that raised an error did not come back from."""
    furthest = list[tuple[int, int, tuple[int, ...]]]()
    for cell in range(len(view.evaluated)):
        wanted = view.evaluated[cell].run.calls
        begun = {rank: calls for rank, calls in view.aligned(cell).items() if calls}
        if not begun:
            continue
        if view.seed(cell) is None and not view.plan.stages.axes:
            number = min(max(calls) for calls in begun.values()) + 1
            if number < len(wanted):
                call = wanted[number]
                return view.finding("forward", call.label, (tuple(begun), _ALL), microbatch=cell, where=call.where)
        left = {rank: max(missing) for rank, calls in begun.items() if (missing := _without_gradient(wanted, calls))}
        if left:
            number = min(left.values())
            furthest.append((number, cell, tuple(rank for rank, last in left.items() if last == number)))
    if not furthest:
        return None
    number, cell, ranks = min(furthest)
    return _through(view, cell, number, (ranks, _ALL))


def _without_gradient(wanted: list[NotedCall], calls: dict[int, NotedCall]) -> list[int]:
    """The calls whose results have a gradient on one device, and none yet on a rank."""
    return [
        number
        for number, call in calls.items()
        if all(grad is None for grad in call.grads) and any(grad is not None for grad in wanted[number].grads)
    ]

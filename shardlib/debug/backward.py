"""The backward of a step: recomputed values, then gradients call by call, and those of leaves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding, worst
from shardlib.debug.forward import how
from shardlib.debug.layout import slice_of
from shardlib.debug.notes import NotedCall, NotedRun
from shardlib.debug.view import StepView


def backward(view: StepView, bad_leaves: Iterable[str]) -> Finding | None:
    """The first thing in backward that differs, in its order: from the last call to the first.

    Args:
        bad_leaves: leaves whose gradients differ when all is done. A gradient inside the loss function that differs counts if
            one of them is computed from it: ranks may rightly hold parts of a sum.
    """
    bad = set(bad_leaves)
    for cell in reversed(range(len(view.evaluated))):
        if found := _recomputed(view, cell) or _calls(view, cell, bad):
            return found
    for cell in reversed(range(len(view.evaluated))):
        if found := _leaves(view, cell, bad):
            return found
    return None


def seed_of(view: StepView, cell: int) -> float | None:
    """The gradient from which a micro-batch's backward began."""
    seeds = [run.seed for runs in view.runs(cell).values() for run in runs if run.seed is not None]
    return seeds[0] if seeds else None


def _recomputed(view: StepView, cell: int) -> Finding | None:
    """A recomputation that gives other values than the forward of the same rank."""
    for rank, runs in view.runs(cell).items():
        for run in runs:
            for number, block in run.blocks.items():
                first = [call for call in run.calls if call.block == number]
                for again in block.again:
                    for before, after in zip(first, again):
                        if before.name != after.name:
                            break
                        apart = [difference(b, a) for b, a in zip(after.values, before.values)]
                        if bad := worst((rank, each) for each in apart):
                            return view.cell_finding(
                                "backward",
                                f"the recomputation of {before.label}",
                                bad,
                                cell,
                                block=block.name,
                                where=before.where,
                            )
    return None


def _calls(view: StepView, cell: int, bad_leaves: set[str]) -> Finding | None:
    wanted, aligned, seed = view.evaluated[cell].run, view.aligned(cell), seed_of(view, cell)
    if seed is None:
        return None
    uses: dict[str, int] = {}
    for number, call in enumerate(wanted.calls):
        for path in call.paths:
            uses.setdefault(path, number)
    for number in reversed(range(len(wanted.calls))):
        apart = [
            (rank, each)
            for rank, calls in aligned.items()
            if number in calls
            and not _in_another_form(view, rank, calls[number], wanted.calls[number])
            and (each := view.apart(rank, calls[number].grads, wanted.calls[number].grads, seed)) is not None
        ]
        bad = worst(apart)
        matters = any(uses.get(path, number + 1) <= number for path in bad_leaves)
        if bad and matters and not _sums_to(view, number, wanted.calls[number], aligned, seed):
            return _named(view, cell, number, bad)
    return None


def _in_another_form(view: StepView, rank: int, mine: NotedCall, wanted: NotedCall) -> bool:
    """Whether a rank holds other values than its part of one device's, such as rows in the order of their experts. (The
    forward has been compared, so that what is computed from them is right.)"""
    apart = view.apart(rank, mine.values, wanted.values)
    return apart is None or apart.matters


def interrupted(view: StepView) -> Finding | None:
    """The call whose forward or backward a step that raised an error did not come back from."""
    never, furthest = Difference(float("inf"), 0.0, 0.0), list[tuple[int, int, tuple[int, ...]]]()
    for cell in range(len(view.evaluated)):
        wanted, aligned = view.evaluated[cell].run, view.aligned(cell)
        begun = {rank: calls for rank, calls in aligned.items() if calls}
        if not begun:
            continue
        if seed_of(view, cell) is None and not view.plan.stages.axes:
            number = min(max(calls) for calls in begun.values()) + 1
            if number < len(wanted.calls):
                call = wanted.calls[number]
                return view.cell_finding("forward", call.label, (tuple(begun), never), cell, where=call.where)
        left = {rank: max(missing) for rank, calls in begun.items() if (missing := _without_gradient(wanted, calls))}
        if left:
            number = min(left.values())
            furthest.append((number, cell, tuple(rank for rank, last in left.items() if last == number)))
    if not furthest:
        return None
    number, cell, ranks = min(furthest)
    return _named(view, cell, number, (ranks, never))


def _without_gradient(wanted: NotedRun, calls: dict[int, NotedCall]) -> list[int]:
    """The calls whose results have a gradient on one device, and none yet on a rank."""
    return [
        number
        for number, call in calls.items()
        if all(grad is None for grad in call.grads) and any(grad is not None for grad in wanted.calls[number].grads)
    ]


def _sums_to(
    view: StepView, number: int, wanted: NotedCall, aligned: dict[int, dict[int, NotedCall]], seed: float
) -> bool:
    """Whether ranks that work on one micro-batch have parts of the gradient of what is computed from parameters alone."""
    if not wanted.paths or wanted.before:
        return False
    calls = [calls[number] for calls in aligned.values() if number in calls]
    for position, due in enumerate(wanted.grads):
        parts = [call.grads[position] for call in calls]
        if due is None or any(part is None or part.shape != due.shape for part in parts):
            return False
        whole = torch.stack([part.double() for part in parts if part is not None]).sum(0)
        if difference(whole, due.double() * seed, due.dtype).matters:
            return False
    return True


def _named(view: StepView, cell: int, number: int, bad: tuple[tuple[int, ...], Difference]) -> Finding:
    """The finding for a result whose gradient differs, while the gradients of all that is computed from it do not."""
    wanted = view.evaluated[cell].run
    users = [call for call in wanted.calls if number in call.before]
    call = wanted.calls[number]
    through = users or [call]
    operation = f"backward of {' and of '.join(dict.fromkeys(user.label for user in through))}"
    leaf = next((path for user in through for path in user.paths), "")
    block = through[0].block
    return view.cell_finding(
        "backward",
        operation,
        bad,
        cell,
        leaf=leaf,
        block="" if block is None else wanted.blocks[block].name,
        where=through[0].where,
        note="; ".join(filter(None, [f"it gives the gradient of what {call.label} returns", how(view, leaf)])),
    )


def _leaves(view: StepView, cell: int, bad_leaves: set[str]) -> Finding | None:
    """A leaf whose gradient from one micro-batch differs, before it is summed with anything."""
    wanted, seed, placed = view.evaluated[cell], seed_of(view, cell), view.plan.placement_of
    if seed is None:
        return None
    for path in bad_leaves:
        apart = []
        for rank, runs in view.runs(cell).items():
            grads = [run.leaf_grads[path] for run in runs if path in run.leaf_grads]
            if not grads or placed[path].style is not None or placed[path].compute.spec.axes or view.plan.stages.axes:
                continue
            due = slice_of(wanted.grads[path] * seed, placed[path].compute.spec, view.plan.sizes, view.coords(rank))
            apart.append((rank, difference(torch.stack(grads).sum(0), due)))
        bad = worst(apart)
        users = [call for call in wanted.run.calls if path in call.paths]
        if bad and users and not view.in_parts(view.plan.bucket_of[placed[path].bucket]):
            block = users[0].block
            return view.cell_finding(
                "backward",
                f"backward of {users[0].label}",
                bad,
                cell,
                leaf=path,
                block="" if block is None else wanted.run.blocks[block].name,
                where=users[0].where,
                note="the parameter's own gradient differs",
            )
    return None

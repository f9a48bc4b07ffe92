"""Tracing a plan without ranks: one micro-batch runs through all stages in turn, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from shardlib.execute.activations.names import require_known
from shardlib.execute.batches import split_batch
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, Turn, default_options
from shardlib.execute.handles import materialise
from shardlib.execute.live import LiveBytes, Stretch
from shardlib.execute.losses import read_loss
from shardlib.execute.phases import Phases, Work, followed
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.alike import as_another, kinds_of
from shardlib.execute.stages.base import Call, keys_of
from shardlib.execute.stages.entry import entered
from shardlib.execute.stages.interpreter import Run, differentiable, fresh_leaf
from shardlib.execute.stages.one import OneStage
from shardlib.execute.stages.pipe import require_blocks
from shardlib.execute.stages.walk import Called, Peak, Sent, Walk, peak_of
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.rng import Key
from shardlib.sharded.landing import Imagined
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, leaves_of, tree_map


def trace(
    loss_fn: Any, plan: Plan, mesh: Mesh, params: Sharded, batch: Tree, buffers: Tree, rng: Key, step: int | None
) -> tuple[Trace, ...]:
    """The trace of each stage, from the first of a rank's micro-batches, at a step with its key, or one that leaves out
    nothing. ``params`` holds the buckets of all stages."""
    if plan.stages.axes:
        return _trace_stages(loss_fn, plan, mesh, params, split_batch(batch, plan, mesh)[0], rng, step)
    return (walk(loss_fn, plan, mesh, params, batch, buffers, rng, step).trace(),)


def walk(
    loss_fn: Any, plan: Plan, mesh: Mesh, params: Sharded, batch: Tree, buffers: Tree, rng: Key, step: int | None
) -> Walk:
    """What the first of a rank's micro-batches does under a plan of one stage. Arguments are as in `trace`."""
    runner, phases = OneStage(loss_fn, plan, mesh, trained=True, with_buffers=buffers is not None), Phases()
    alone: list[list[Stretch]] = []
    summed: list[list[Stretch]] = []
    landing: Imagined  # of the last run

    def run(*indices: int) -> None:
        """Note what some micro-batches, with the cast batch, do to memory."""
        nonlocal landing
        landing = Imagined(plan, mesh, ())
        live = LiveBytes(lambda: phases.now)
        with live, followed(lambda _: phases):
            microbatches = split_batch(batch, plan, mesh)
            keys = keys_of(plan, mesh, microbatches, rng)
            thinned = [plan.step.thinned(step, key) for key in keys]
            call = Call(params, microbatches, keys, thinned, buffers, 1.0, 1.0)
            gradients = runner.executor.gradients(default_options(mesh, landing))
            for index in indices:
                runner.microbatch(call, index, buffers, gradients)
        summed.append(live.stretches())
        if len(indices) == 1:
            alone.append(live.stretches(without=gradients.held))

    with Work(lambda: phases.now, lambda: _moved(runner.executor, mesh)) as work:
        run(0)
    if runner.executor.gathers:  # the second run follows the first one's trace, and gathers the next unit ahead
        run(0)
    if (
        plan.step.microbatches > 1
    ):  # the others find sums of earlier ones, and the last one ends with the step's exchanges
        run(*sorted({0, 1, plan.step.microbatches - 1}))
    return Walk(alone, summed, work.done, runner.executor.touches, phases.blocks, landing.spare)


def _moved(executor: Executor, mesh: Mesh) -> dict[Any, int]:
    """Bytes that the loss has sent, and those of blocks' inputs moved to host memory and back, and held there."""
    host = executor.host
    sent = {Sent(axis): count for axis, count in mesh.traffic.activations.items()}
    called = {Called(axis): count for axis, count in mesh.traffic.activation_calls.items()}
    done: dict[Any, int] = {**sent, **called}
    return done if host is None else {**done, "down": host.down, "up": host.up, "host": host.held}


def _trace_stages(
    loss_fn: Any, plan: Plan, mesh: Mesh, params: Sharded, batch: Tree, rng: Key, step: int | None
) -> tuple[Trace, ...]:
    blocks, spans = require_blocks(loss_fn, plan), plan.stages.spans
    runs: list[Run] = []
    carry: Any = None
    passed: list[tuple[int, int]] = []
    sent: list[dict[str, int]] = []
    called: list[dict[str, int]] = []
    phases: list[Phases] = []
    alive: list[LiveBytes] = []
    work: list[Work] = []
    memory: list[tuple[int, int]] = []  # bytes that a stage keeps, and bytes of the incoming carry
    gradients: list[Gradients] = []
    known: list[
        tuple[Any, Tree]
    ] = []  # of each stage that is traced: its kind, with its carry's form, and the next carry
    firsts: list[int] = []  # the first block of each of them
    stands: list[int] = []  # for each stage the number of the one that is traced for it
    thinned = plan.step.thinned(step, rng)
    kinds = (
        kinds_of(plan, blocks) if thinned is None else range(len(spans))
    )  # a step leaves out some layers, not others
    for stage, (kind, (start, stop)) in enumerate(zip(kinds, spans, strict=True)):
        seen = kind, [_form(leaf) for leaf in leaves_of(carry)]
        number = next((number for number, (other, _) in enumerate(known) if other == seen), len(known))
        stands.append(number)
        if number < len(known):
            carry = tree_map(_another, known[number][1])
            continue
        firsts.append(start)
        sent.append({})
        called.append({})
        work.append(Work())
        phases.append(Phases(start))
        alive.append(LiveBytes(lambda phase=phases[-1]: phase.now))  # type: ignore[misc]
        given, inputs = entered(carry)
        arrived = [leaf.untyped_storage() for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)]
        arriving, storages = sum(storage.nbytes() for storage in arrived), [*map(ref, arrived)]
        carries = [given]  # from here the function's alone
        del given, arrived
        carry = None

        def compute(tree: Tree, start: int = start, stop: int = stop, carries: list[Any] = carries) -> Any:
            result = materialise(blocks.run(tree, carries.pop(), batch, start, stop, rng))
            return read_loss(result, False).total if stop == len(blocks) else result

        executor = Executor(plan.of_stage(stage), mesh, trained=True)
        gradients.append(executor.gradients(default_options(mesh)))
        follow = followed(lambda _, phases=phases[-1]: phases)  # type: ignore[misc]
        with _counting(mesh, sent[-1], called[-1]), alive[-1], work[-1], follow:
            result = executor.open(params, gradients[-1], compute, thinned)
        executor.rest()
        stays = sum(storage.nbytes() for each in storages if (storage := each()) is not None)
        memory.append((alive[-1].now + stays, arriving))
        runs.append(Run(executor, inputs, differentiable(result)))
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        passed.append((sum(leaf.nbytes for leaf in tensors), sum(leaf.nbytes for leaf in runs[-1].outputs)))
        carry = tree_map(_another, result)
        known.append((seen, tree_map(_another, result)))
    if plan.step.sequence:
        require_whole_loss(plan.step.sequence, mesh, {step for run in runs for step in run.executor.record.done}, None)
    if plan.step.remat:
        require_known(plan.step.remat.save, {name for run in runs for name in run.executor.record.names})
    for run, grads, counts, calls, watch, done in list(zip(runs, gradients, sent, called, alive, work))[::-1]:
        seeds = [torch.ones_like(output) for output in run.outputs]
        with _counting(mesh, counts, calls), watch, done:
            if plan.stages.schedule.splits and run.inputs and run.outputs:
                run.executor.inputs_gradient(run.outputs, seeds, run.inputs)
                run.executor.rest()
                run.executor.weights_gradient(grads, Turn(0, last=False))
            else:
                run.executor.differentiate(run.outputs, seeds, run.inputs, grads, Turn(0, last=False))
            grads.land()
        run.executor.close()
    peaks = [
        (peak_of(watch.stretches(without=grads.held)), peak_of(watch.stretches()))
        for watch, grads in zip(alive, gradients)
    ]
    traced = [
        Trace(
            run.executor.touches, counts, live.bytes + carry_bytes, peak.bytes + carry_bytes, kept,
            out, back, collectives=calls, **_noted(done, live, peak), **_kept(run.executor, phase),
        )
        for run, (out, back), counts, calls, (kept, carry_bytes), (live, peak), done, phase
        in zip(runs, passed, sent, called, memory, peaks, work, phases)
    ]  # fmt: skip
    return tuple(as_another(traced[n], start - firsts[n]) for n, (start, _) in zip(stands, spans, strict=True))


def _form(leaf: Any) -> Any:
    """What a carry's leaf is to the stage that it enters."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad


def _another(leaf: Any) -> Any:
    """A leaf of a carry as from another rank: in memory of its own."""
    return fresh_leaf(leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf


def _noted(work: Work, live: Peak, peak: Peak) -> dict[str, Any]:
    """The operations that were counted, and the phases of the peaks."""
    counted = {"flops": work.flops, "launches": work.launches, "streamed": work.streamed}
    return counted | {"live_in": live.phase, "peak_in": peak.phase}


def _kept(executor: Executor, phases: Phases) -> dict[str, Any]:
    """The number of blocks, and bytes of their inputs moved to host memory and back so far, and held there."""
    host, blocks = executor.host, {"blocks": phases.blocks}
    return blocks if host is None else blocks | {"down": host.down, "up": host.up, "host": host.held}


@contextmanager
def _counting(mesh: Mesh, counts: dict[str, int], calls: dict[str, int]) -> Iterator[None]:
    """Add the payload bytes of activations sent in this context to ``counts``, and their collectives to ``calls``."""
    traffic = mesh.traffic
    totals = ((traffic.activations, counts), (traffic.activation_calls, calls))
    before = [dict(total) for total, _ in totals]
    yield
    for (total, added), old in zip(totals, before, strict=True):
        for axis, number in total.items():
            added[axis] = added.get(axis, 0) + number - old.get(axis, 0)

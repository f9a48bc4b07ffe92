"""`make_plan`: the plan of a training job, with the bytes that ranks will hold and send, before any rank runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardlib.common._compat import DataDependentOutputException, FakeTensorMode
from shardlib.errors import IllegalComposition
from shardlib.execute.batches import as_tensors
from shardlib.execute.buffers import buffer_sizes
from shardlib.execute.losses import require_function
from shardlib.execute.stages.tracing import trace
from shardlib.init.deferred import defer
from shardlib.mesh.mesh import Mesh, as_mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.optim.wrapping import require_transformations
from shardlib.plan.build import build_plan
from shardlib.plan.plan import Plan
from shardlib.plan.recompute import Recompute, fewest
from shardlib.plan.reductions import Reductions
from shardlib.plan.tables import size
from shardlib.plan.transform import Transform
from shardlib.rng import Key
from shardlib.shard import default_transform
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, leaves_of, tree_map


def make_plan(
    params: Tree | Callable[[], Tree],
    mesh: Any,
    transform: Transform | None = None,
    *,
    stage: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    batch: Any = None,
    buffers: Any = None,
    device_memory: int | None = None,
) -> Plan:
    """Plan without running: specs, bytes and messages per rank. Moves no data and needs no ranks.

    Args:
        params: a pytree of tensors, real or on the meta device, or a function that makes one (traced, without memory).
        mesh: any mesh, abstract ones included.
        transform: as for `shard`.
        stage: as for `shard`.
        loss_fn: if given with ``batch`` (and ``buffers``, if the loss takes them), the loss and its backward are traced on
            fake tensors, which shows the units that are gathered and how often, what passes between stages, and the bytes
            of activations. Without a trace each unit counts as gathered once forward and once backward, and what passes
            between stages is not counted.
        batch: one rank's share of a batch, on any device, the meta device included.
        optimizer: a gradient transformation, whose state and messages are counted.
        buffers: the buffers that ``loss_fn`` takes, if any.
        device_memory: bytes of a rank's device. A plan with a larger peak is refused; ``remat("auto")`` recomputes as few
            blocks as fit. Needs ``loss_fn``, ``batch`` and ``optimizer``.

    Raises:
        TreeError, IllegalComposition, SpecError: as `shard`.
        TypeError: an optimizer that is not a gradient transformation; ``device_memory`` without what it needs.
        IllegalComposition: ``device_memory`` is not enough, or the loss cannot be traced, so that nobody knows.

    >>> params = {"w": torch.empty(1000, 1000, device="meta")}
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=8), sl.zero(2), optimizer=sl.optim.adamw(1e-3))
    >>> plan.bytes("param"), plan.bytes("grad"), plan.bytes("optimizer")
    (4000000, 500000, 1000000)
    >>> plan.payload()
    {'data': 7000000}
    """
    if optimizer is not None:
        require_transformations("make_plan", optimizer)
    mesh = as_mesh(mesh)
    tree = defer(params).tree if callable(params) else params
    plan = build_plan(tree, mesh, default_transform(transform, stage), optimizer=optimizer)
    plan = replace(plan, buffers=buffer_sizes(buffers))
    how = plan.step.remat
    if device_memory is not None and (loss_fn is None or batch is None or optimizer is None):
        raise TypeError("make_plan(device_memory=) weighs a whole step: give loss_fn=, batch= and optimizer= too")
    if how and device_memory is None:
        how.require_decided()
    if loss_fn is None or batch is None:
        return plan
    traced = partial(_traced, device=mesh.device, loss_fn=loss_fn, batch=batch, buffers=buffers)
    if device_memory is None:
        return traced(plan)
    held = sum(leaf.nbytes for leaf in leaves_of(batch) if hasattr(leaf, "nbytes"))
    return _fitting(plan, how, traced, device_memory, held)


def _fitting(plan: Plan, how: Recompute | None, traced: Callable[[Plan], Plan], budget: int, batch: int) -> Plan:
    """The traced plan, whose peak, with the batch, stays within the budget. "auto" recomputes the fewest blocks that do."""
    auto = how is not None and how.policy == "auto"
    plans: dict[int, Plan] = {}

    def planned(blocks: int) -> Plan:
        if blocks not in plans:
            remat = replace(how, policy="full", blocks=blocks) if how and auto else how
            plans[blocks] = traced(replace(plan, step=replace(plan.step, remat=remat)))
        return plans[blocks]

    def peak(blocks: int) -> int:
        found = planned(blocks).peak_bytes
        if found is None:
            raise IllegalComposition("device_memory= needs a loss that can be traced, and this one reads values")
        return found + batch

    count = max((trace.blocks for trace in planned(0).traces or ()), default=0) if auto else 0
    chosen = fewest(count, lambda blocks: peak(blocks) <= budget)
    if chosen is None:
        least = f"with all of {count} blocks recomputed, {size(peak(0))} with none" if auto else "with its batch"
        raise IllegalComposition(
            f"a rank's peak is {size(peak(count))} {least}, and device_memory={budget} is {size(budget)}. Recompute blocks "
            "(sl.remat), keep their inputs by store='host', raise the stage of sl.zero, add sl.offload(), or make "
            "micro-batches smaller by sl.accumulate"
        )
    found = planned(chosen)
    if not auto:
        return found
    note = f"remat('auto'): {chosen} of {count} blocks are recomputed, for a peak of {size(peak(chosen))} of {size(budget)}"
    return replace(found, claims=found.claims and found.claims.noting([note]))


_UNEVEN = "if values decide which units a rank uses, all ranks gather the units that any rank uses"


def _traced(plan: Plan, device: torch.device, loss_fn: Callable[..., Any], batch: Any, buffers: Any) -> Plan:
    """The plan with its traces, from one micro-batch on fake tensors. If tracing fails, a note in the log says so."""
    require_function(loss_fn, "the loss function", "params, batch" if buffers is None else "params, buffers, batch")
    mesh = Mesh(plan.sizes, 0, {axis: EchoGroup(size) for axis, size in plan.sizes.items()}, device, abstract=True)
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def pretend(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device == device or leaf.layout is not torch.strided:
            return fake.from_tensor(leaf)
        with fake:  # a tensor of another device, or without memory: the trace runs on one device
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    batch, buffers = tree_map(pretend, as_tensors(batch, device)), tree_map(pretend, buffers)
    # Codecs' kernels do not run on tensors without values, so everything is sent uncompressed.
    plain = replace(plan, reductions=Reductions(second_level=plan.reductions.second_level))
    with fake:
        stored = {b.name: torch.empty(b.size(b.param_level), dtype=b.dtype, device=device) for b in plan.buckets}
        try:
            traces = trace(loss_fn, plain, mesh, Sharded(plain, mesh, "param", stored), batch, buffers, Key(0))
        except DataDependentOutputException as error:
            notes = f"not traced: the loss reads values ({error})", _UNEVEN
            return replace(plan, claims=plan.claims and plan.claims.noting(notes))
    return replace(plan, traces=traces)

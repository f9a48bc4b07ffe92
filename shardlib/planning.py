"""`make_plan`: the plan of a training job, with the bytes that ranks will hold and send, before any rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardlib.execute.batches import as_tensors
from shardlib.execute.buffers import BufferKinds, buffer_sizes
from shardlib.execute.stages.tracing import Tracing, traced_once
from shardlib.mesh.mesh import AnyMesh, as_mesh
from shardlib.nn.functional import LossResult
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_count
from shardlib.optim.combine import require_transformations
from shardlib.optim.state_storage import fault_on_disk
from shardlib.plan.build import build_plan
from shardlib.plan.limits import Limits, Planner, fitted
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform
from shardlib.rng import Key
from shardlib.sharded.shard import outline
from shardlib.sharding import default_transform
from shardlib.transforms.changes import changes, difference, largest, other_changes
from shardlib.tree import Tree, tensors_of


def make_plan(
    params: Tree | Callable[[], Tree],
    mesh: AnyMesh,
    transform: Transform | None = None,
    *,
    stage: int | None = None,
    loss_fn: Callable[..., LossResult] | None = None,
    optimizer: GradientTransformation | None = None,
    batch: Any = None,
    buffers: Any = None,
    buffer_kinds: Mapping[str, str] | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
    ranks_per_host: int | None = None,
    step: int | None = None,
    rng: Key | int = 0,
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
        buffers, buffer_kinds: the buffers that ``loss_fn`` takes, and what they are, as for `make_train_step`.
        device_memory: what a rank's device has, in bytes or as text such as "24GiB". A plan with a larger peak, in device
            memory or in another that is limited, is refused, with the cheapest change of its transforms that fits;
            ``remat("auto")`` recomputes as few blocks as fit. Needs ``loss_fn``, ``batch`` and ``optimizer``.
        host_memory: what a host has, for all of its ranks together.
        disk: what a host's disks have for offloaded states.
        ranks_per_host: ranks that share a host, neighbours in the mesh; by default as torchrun started them, and all ranks
            of an abstract mesh.
        step: the number of one step, for what it leaves out of layers (`progressive_layer_drop`): the plan, its trace and
            payload are then that step's. By default of a step that leaves out nothing.
        rng: the key or seed that the train step is made with, by which layers are drawn.

    Raises:
        TreeError, IllegalComposition, SpecError: as `shard`.
        TypeError: an optimizer that is not a gradient transformation; a limit without what it needs.
        ValueError: a limit that is no size, fewer than one rank per host, or a step that is no number of one.
        IllegalComposition: the plan does not fit its limits, or the loss cannot be traced, so that nobody knows.

    >>> params = {"w": torch.empty(1000, 1000, device="meta")}
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=8), sl.zero(2), optimizer=sl.optim.adamw(1e-3))
    >>> plan.bytes("param"), plan.bytes("grad"), plan.bytes("optimizer")
    (4000000, 500000, 1000000)
    >>> plan.payload()
    {'data': 7000000}
    """
    if optimizer is not None:
        require_transformations("make_plan", optimizer)
    check("make_plan", "the number of a step is an integer from 0", step=(step, step is None or is_count(step)))
    mesh = as_mesh(mesh)
    tree = outline("make_plan", params)
    batch = as_tensors(batch, torch.device("cpu"))  # where an array's memory is a tensor's
    leaves = tensors_of(batch)
    sharing = mesh.ranks_per_host if ranks_per_host is None else ranks_per_host
    limits = Limits.given(device_memory, host_memory, disk, sharing, sum(leaf.nbytes for leaf in leaves))
    if limits and (loss_fn is None or batch is None or optimizer is None):
        raise TypeError(f"make_plan({limits.arguments}) weighs a whole step: give loss_fn=, batch= and optimizer= too")

    key = (rng if isinstance(rng, Key) else Key(rng)).fold_in(0 if step is None else step)

    sizes = buffer_sizes(buffers, BufferKinds(buffer_kinds))

    def rough(transform: Transform) -> Plan:
        plan = replace(build_plan(tree, mesh, transform, optimizer=optimizer), buffers=sizes)
        return plan if step is None else plan.at_step(step, key)

    transform = default_transform(transform, stage)
    plan = rough(transform)
    if loss_fn is None or batch is None:
        if plan.step.remat:
            plan.step.remat.require_decided()
        return plan
    known = traced_once(Tracing(loss_fn, batch, buffers, mesh.device, step, key))
    if limits is None or optimizer is None:
        if plan.step.remat:
            plan.step.remat.require_decided()
        return known(plan)

    def fitting(transform: Transform) -> Plan:
        return fitted(rough(transform), known, limits)

    plan = fitting(transform)
    if not limits.excess(plan):
        plan = plan if known.holds(plan) else fitting(transform)
    if not limits.excess(plan):
        return replace(plan, claims=plan.claims and plan.claims.noting(map(str, limits.uses(plan))))
    rows = min((leaf.shape[0] for leaf in leaves if leaf.dim()), default=1)
    wanted = "disk" in limits.bytes or any(bucket.memory.optimizer == "disk" for bucket in plan.everywhere.buckets)
    on_disk = wanted and fault_on_disk(optimizer, plan) is None
    edits = partial(changes, sizes=mesh.shape, rows=rows, elementwise=optimizer.separable, disk=on_disk)
    others = partial(other_changes, weights=largest(plan))
    raise Planner(limits, edits, difference, rough, fitting, known.holds, others).refusal(transform, plan)

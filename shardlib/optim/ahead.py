"""Updates of buckets that run beside a step's computation, on a thread of their own.

They are made in memory of their own: a bucket's state is copied, and the copy is updated. So a state stays what it is until
the step takes the new one, and an update that does not hold is undone by leaving it. Where a step donates its state, the old
memory serves the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from shardlib.common.pages import cloned
from shardlib.mesh.staging import Slot, taken
from shardlib.mesh.transfers import Transfer
from shardlib.optim.storing import optimizer_shard
from shardlib.optim.train_state import OptimizerState, copied
from shardlib.plan.buckets import Bucket
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, unflatten


class Updated(NamedTuple):
    """A bucket after its update.

    Attributes:
        opt: its part of the optimizer's state.
        shard: its new parameters, in the dtype in which they are stored, in host memory until the bucket's next update.
    """

    opt: OptimizerState
    shard: torch.Tensor


class Ahead:
    """The updates of one step after the other that run ahead.

    Args:
        body: ``body(bucket, params, grad, inner, factor, copy) -> inner`` updates a bucket: ``params`` in place, and ``copy``
            in the dtype in which parameters are stored. It may use up the memory of ``grad`` and ``inner``.
        pinned: whether the device has a memory of its own.
        donates: whether a step may reuse the memory of the state it is given.

    Attributes:
        undone: the number of this step's updates that did not hold.
    """

    def __init__(self, body: Callable[..., Any], pinned: bool, donates: bool) -> None:
        self._body, self._pinned, self._donates = body, pinned, donates
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[str, Future[Updated]] = {}
        self._spare: dict[str, OptimizerState] = {}
        self._slots: dict[str, Slot] = {}
        self._parts: Mapping[str, OptimizerState] = {}
        self.undone = 0

    def prepare(self, params: Sharded, parts: Mapping[str, OptimizerState], factor: torch.Tensor | None) -> None:
        """Begin a step, of which the state of each bucket is in ``parts``, and whose gradients are updated by ``factor``."""
        self.begin()
        # The tree may be donated while the last updates run.
        self._params = Sharded(params.plan, params.mesh, "param", dict(params.buffers))
        self._parts, self._factor = parts, factor

    def begin(self) -> None:
        """Leave all updates; their gradients are computed (again)."""
        self._leave_all()
        self.undone = 0

    def landed(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> None:
        """Update a bucket as soon as ``transfer`` is complete. ``grad`` does not change."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "updates", torch.set_num_threads, (torch.get_num_threads(),))
        self._jobs[bucket.name] = self._pool.submit(self._update, bucket, grad, transfer)

    def changes(self, bucket: Bucket) -> None:
        """Leave the update of a bucket whose gradient changes now."""
        self._leave(bucket.name)

    def result(self, bucket: Bucket, factor: torch.Tensor | None) -> Updated | None:
        """A bucket's update, if it was made, and with this factor; else the bucket's state is still to be updated."""
        if bucket.name not in self._jobs:
            return None
        if not _equal(factor, self._factor):
            self._leave(bucket.name)
            return None
        updated = self._jobs.pop(bucket.name).result()
        if self._donates:
            self._spare[bucket.name] = self._parts[bucket.name]
        return updated

    def slot(self, bucket: Bucket) -> Slot:
        """The empty memory for a bucket's new parameters."""
        kept = bucket.master_dtype == bucket.dtype  # the master itself is sent
        slot = self._slots.setdefault(bucket.name, Slot(self._pinned))
        return slot.empty(0 if kept else taken(bucket.owned, bucket.dtype))

    def sent(self, bucket: Bucket, transfer: Transfer) -> None:
        """Keep a bucket's new parameters until ``transfer`` is complete."""
        self._slots[bucket.name].sent(transfer)

    def end(self) -> None:
        """End a step, and leave the updates that were not asked for."""
        self._leave_all()
        self._parts = {}

    def _leave_all(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        for name in list(self._jobs):
            self._leave(name)

    def _leave(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is None:
            return
        self.undone += 1
        if not job.cancel():
            wait([job])
            if job.exception() is None:
                self._spare[name] = job.result().opt

    @torch.no_grad()
    def _update(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> Updated:
        name = bucket.name
        transfer.wait()
        opt = _copied(self._parts[name], self._spare.pop(name, None))
        master = opt.masters.get(name)
        slot = self.slot(bucket)
        shard = master if master is not None and master.dtype == bucket.dtype else slot.take(bucket.owned, bucket.dtype)
        if master is None:
            master = shard.copy_(optimizer_shard(self._params, bucket))
        inner = self._body(bucket, master, grad.clone(), opt.inner, self._factor, shard)
        return Updated(OptimizerState(opt.masters, inner), shard)


def _copied(opt: OptimizerState, spare: OptimizerState | None) -> OptimizerState:
    """A copy of a bucket's state, in the memory of ``spare`` where that fits."""
    if spare is None:
        return copied(opt)
    _, values, treedef = flatten(opt)
    _, memory, other = flatten(spare)
    return unflatten(treedef, map(_copied_leaf, values, memory)) if treedef == other else copied(opt)


def _copied_leaf(value: Any, memory: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Buckets share numbers.
    fits = (
        value.dim() and isinstance(memory, torch.Tensor) and (value.shape, value.dtype) == (memory.shape, memory.dtype)
    )
    return memory.copy_(value) if fits else cloned(value)


def _equal(factor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if factor is None or other is None:
        return factor is other
    return float(factor) == float(other)

"""Updates of buckets that run beside a step's computation, on a thread of their own.

They are made in memory of their own: an update reads a bucket's state, and writes the next one elsewhere. So a state stays
what it is until the step takes the new one, and an update that does not hold is undone by leaving it. Where a step donates
its state, the old memory serves the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from shardlib.common.devices import alike, cloned, pins
from shardlib.mesh.memories import Slot, Transfer, taken
from shardlib.optim.storing import optimizer_shard
from shardlib.optim.train_state import OptimizerState
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
        body: ``body(bucket, params, grad, inner, factor, copy, old) -> inner`` updates a bucket from ``old``, its parameters
            and state: writes the new ones to ``params``, ``inner`` and, in the dtype in which they are stored, ``copy``.
        device: the device that the rank computes on.
        donates: whether a step may reuse the memory of the state it is given.
    """

    def __init__(self, body: Callable[..., Any], device: torch.device, donates: bool) -> None:
        self._body, self._device, self._donates = body, device, donates
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[str, Future[Updated]] = {}
        self._spare: dict[str, OptimizerState] = {}
        self._slots: dict[str, Slot] = {}
        self._params: Sharded | None = None
        self._parts: Mapping[str, OptimizerState] = {}
        self._factor: torch.Tensor | None = None
        self._left = 0

    def prepare(self, params: Sharded, parts: Mapping[str, OptimizerState], factor: torch.Tensor | None) -> None:
        """Begin a step, of which the state of each bucket is in ``parts``, and whose gradients are updated by ``factor``."""
        self.begin()
        # The tree may be donated while the last updates run.
        self._params = Sharded(params.plan, params.mesh, "param", dict(params.buffers))
        self._parts, self._factor = parts, factor

    def begin(self) -> None:
        """Leave all updates; their gradients are computed (again)."""
        self._leave_all()
        self._left = 0

    @property
    def undone(self) -> int:
        """The number of this step's updates that were left, or not asked for."""
        return self._left + len(self._jobs)

    def landed(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> None:
        """Update a bucket as soon as ``transfer`` is complete. ``grad`` does not change."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "updates", _begin, (torch.get_num_threads(), self._device))
        self._jobs[bucket.name] = self._pool.submit(self._update, bucket, grad, transfer)

    def changes(self, bucket: Bucket) -> None:
        """Leave the update of a bucket whose gradient changes now."""
        self._leave(bucket.name)

    def complete(self, factor: torch.Tensor | None) -> None:
        """Return once all updates are made. Those with another factor are left. An update that failed raises its error."""
        if not _equal(factor, self._factor):
            self._leave_all()
        for job in self._jobs.values():
            job.result()

    def result(self, bucket: Bucket) -> Updated | None:
        """A bucket's update, of those that are `complete`; else the bucket's state is still to be updated."""
        if bucket.name not in self._jobs:
            return None
        updated = self._jobs.pop(bucket.name).result()
        if self._donates:
            self._spare[bucket.name] = self._parts[bucket.name]
        return updated

    def slot(self, bucket: Bucket) -> Slot:
        """The empty memory for a bucket's new parameters."""
        kept = bucket.master_dtype == bucket.dtype  # the master itself is sent
        slot = self._slots.setdefault(bucket.name, Slot(pins(self._device)))
        return slot.empty(0 if kept else taken(bucket.owned, bucket.dtype))

    def sent(self, bucket: Bucket, transfer: Transfer) -> None:
        """Keep a bucket's new parameters until ``transfer`` is complete."""
        self._slots[bucket.name].sent(transfer)

    def end(self) -> None:
        """End a step, or one that raised: leave the updates that were not asked for, and the memory of its state."""
        self._leave_all()
        self._params, self._parts, self._factor = None, {}, None

    def give_back(self) -> None:
        """Free the memory for the next step's states and parameters."""
        self._spare.clear()
        self._slots.clear()

    def _leave_all(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        for name in list(self._jobs):
            self._leave(name)

    def _leave(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is None:
            return
        self._left += 1
        if not job.cancel():
            wait([job])
            if job.exception() is None:
                self._spare[name] = job.result().opt

    @torch.no_grad()
    def _update(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> Updated:
        name = bucket.name
        transfer.wait()
        old = self._parts[name]
        opt = _memory(old, self._spare.pop(name, None))
        before, master = old.masters.get(name), opt.masters.get(name)
        slot = self.slot(bucket)
        shard = master if master is not None and master.dtype == bucket.dtype else slot.take(bucket.owned, bucket.dtype)
        if master is None:
            assert self._params is not None  # the step has not ended
            before, master = optimizer_shard(self._params, bucket), shard
        inner = self._body(bucket, master, grad, opt.inner, self._factor, shard, (before, old.inner))
        return Updated(OptimizerState(opt.masters, inner), shard)


def _begin(threads: int, device: torch.device) -> None:
    """Let the present thread compute as its rank does."""
    torch.set_num_threads(threads)
    if pins(device):
        torch.accelerator.set_device_index(device.index)


def _memory(opt: OptimizerState, spare: OptimizerState | None) -> OptimizerState:
    """Memory for the next state of a bucket, that of ``spare`` where it fits. Numbers have their values."""
    _, values, treedef = flatten(opt)
    others = flatten(spare) if spare is not None else None
    free = others[1] if others is not None and others[2] == treedef else itertools.repeat(None)
    return unflatten(treedef, map(_memory_of_leaf, values, free))


def _memory_of_leaf(value: Any, memory: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.dim():  # buckets share numbers
        return cloned(value)
    fits = isinstance(memory, torch.Tensor) and (value.shape, value.dtype) == (memory.shape, memory.dtype)
    return memory if fits else alike(value)


def _equal(factor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if factor is None or other is None:
        return factor is other
    return float(factor) == float(other)

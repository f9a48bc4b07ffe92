"""The update of one group of buckets: of masters, the optimizer's state and the stored parameters, each in its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.mesh.memories import MEMORIES, Slot, taken
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import GradientTransformation, Packed
from shardlib.optim.separate import separate_memory, turns
from shardlib.optim.shards import MeshShards
from shardlib.optim.storing import Storing, optimizer_shard
from shardlib.optim.train_state import OptimizerState
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.gradient_offload import GradientOffload
from shardlib.tree import tree_map


class GroupUpdate:
    """The update of one group after the other.

    Args:
        groups: the buckets that are updated together.
        separate: whether groups are updated one by one; else the only one has all buckets.
    """

    def __init__(
        self,
        optimizer: GradientTransformation,
        mesh: Mesh,
        groups: Sequence[Sequence[Bucket]],
        separate: bool,
    ) -> None:
        self._optimizer, self._mesh, self._separate = optimizer, mesh, separate
        # Two: while the parameters of one group are on their way, the next group is updated.
        self._slots = [Slot(mesh.transfers.apart) for _ in groups[:2]]

    def run(
        self,
        group: Sequence[Bucket],
        storing: Storing,
        opt: OptimizerState,
        grads: Mapping[str, torch.Tensor],
        factor: torch.Tensor | None,
        shards: MeshShards,
        landing: GradientOffload,
        slot: Slot | None = None,
    ) -> OptimizerState:
        """Update the buckets of a group; ``opt`` is their part of the state, and so is the result.

        Args:
            slot: empty memory for new parameters; None for this object's own.
        """
        names, params = [bucket.name for bucket in group], storing.params
        slot = self._slot(group) if slot is None else slot
        written, copies = {}, {}
        for bucket in group:
            master = opt.masters.get(bucket.name)
            if master is None:
                written[bucket.name] = copies[bucket.name] = optimizer_shard(params, bucket)
                continue
            written[bucket.name] = master
            if master.dtype == bucket.dtype:
                copies[bucket.name] = master
            elif not self._crosses(bucket):
                copies[bucket.name] = optimizer_shard(params, bucket)
            elif bucket.memory.optimizer == "device":
                copies[bucket.name] = torch.empty(bucket.owned, dtype=bucket.dtype, device=self._mesh.device)
            else:
                copies[bucket.name] = slot.take(bucket.owned, bucket.dtype)
        if self._separate:
            some = {name: grads[name] for name in names}
            factor = None if factor is None or not group else scalar(float(factor), written[names[0]].device)
            after = self._optimizer.body(written, some, opt.inner, scale=factor, shards=shards, copies=copies)
        else:
            after = self._optimizer.apply(written, grads, opt.inner, scale=factor, shards=shards, copies=copies)
        # The next step's gradients are written to this step's.
        after = separate_memory(after, [grads[bucket.name] for bucket in group if landing.moves(bucket)])
        for bucket in group:
            shard = copies[bucket.name]
            if _lent(bucket) and shard is opt.masters.get(bucket.name) and params.on_disk is None:
                own = (
                    slot.take(bucket.owned, bucket.dtype) if self._crosses(bucket) else optimizer_shard(params, bucket)
                )
                shard = own.copy_(shard)
            slot.sent(storing.put(bucket, shard))
        return OptimizerState(opt.masters, after)

    def imitate(self, group: Sequence[Bucket], opt: OptimizerState, shards: MeshShards) -> None:
        """Update a group's buckets of zeros, for the exchanges that this rank has not made. Numbers among their part ``opt``
        of the state keep their values, since an optimizer may refuse others."""
        device = self._mesh.device_for(group[0].memory.optimizer)

        def imitated(leaf: Any) -> Any:
            if isinstance(leaf, Packed):  # on disk
                return torch.zeros_like(leaf.like, device=device)
            return torch.zeros_like(leaf, device=device) if leaf.dim() else leaf.clone()

        params, grads = (
            {b.name: torch.zeros(b.owned, dtype=b.master_dtype or b.dtype, device=device) for b in group} for _ in "pg"
        )
        shards.exchanges.again()
        self._optimizer.body(params, grads, tree_map(imitated, opt.inner), scale=None, shards=shards, copies=None)

    def give_back(self) -> None:
        """Free the host memory that is kept for the next step, which makes it anew."""
        for slot in self._slots:
            slot.give_back()

    def _crosses(self, bucket: Bucket) -> bool:
        """Whether new parameters are written in one memory, beside the master of another dtype, and stored in another."""
        works, stored = MEMORIES[bucket.memory.optimizer].works, bucket.memory.param
        return MEMORIES[stored].rests or (self._mesh.transfers.apart and works != stored)

    def _slot(self, group: Sequence[Bucket]) -> Slot:
        """Memory for the group's new parameters; slots take turns."""
        self._slots.append(self._slots.pop(0))
        staged = [
            bucket
            for bucket in group
            if self._crosses(bucket)
            and bucket.memory.optimizer != "device"
            and bucket.master_dtype
            and (bucket.master_dtype != bucket.dtype or _lent(bucket))
        ]
        return self._slots[-1].empty(sum(taken(bucket.owned, bucket.dtype) for bucket in staged))


def _lent(bucket: Bucket) -> bool:
    """Whether the master's memory is another's as soon as the update is done."""
    return MEMORIES[bucket.memory.optimizer].rests


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """A 0-d float64 tensor."""
    return torch.full((), value, dtype=torch.float64, device=device)


# The groups of buckets that an optimizer updates together, in the order of their updates.


def update_groups(optimizer: GradientTransformation, plan: Plan) -> list[tuple[Bucket, ...]]:
    """The buckets that are updated together, in the order of their updates.

    Raises:
        IllegalComposition: an optimizer that is not elementwise, with states in two memories or updates that run ahead.
    """
    moved = any(bucket.memory.optimizer != "device" for bucket in plan.trained)
    on_device = tuple(bucket for bucket in plan.trained if bucket.memory.optimizer == "device")
    if moved and plan.step.ahead and not optimizer.separable:
        raise IllegalComposition(
            f"offload({plan.step.update}=True) updates one bucket at a time beside other work, and this optimizer reads "
            f"across parameters; leave out {plan.step.update}, or use an elementwise optimizer, such as adamw"
        )
    if optimizer.in_turn(plan):
        return turns(plan)
    if moved and on_device:
        raise IllegalComposition(
            f"offload leaves the states of {len(on_device)} of {len(plan.trained)} buckets on the device, and this optimizer "
            "reads across parameters, so that it needs all of them in one memory; use offload(fraction=1.0)"
        )
    return [plan.trained]

"""The update of a train state: of masters, the optimizer's state and the stored parameters, each in its memory.

Where the optimizer works in another memory than the parameters lie in, an elementwise optimizer takes one bucket after the
other, in the order in which gradients land, so that the first new parameters are on their way while later gradients arrive:

    gradients      land 3 | land 2 | land 1 |
    update                 |  3    |  2    |  1    |
    parameters                     | up 3  | up 2  | up 1  |

Clips that come first in a chain take their factor from the squares that were summed as the gradients landed. An optimizer
that reads across elements otherwise updates all buckets at once, where their states lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.errors import IllegalComposition
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.staging import Slot, taken
from shardlib.mesh.transport.activity import naming
from shardlib.optim.base import GradientTransformation
from shardlib.optim.resting import resting_of
from shardlib.optim.separate import Separation
from shardlib.optim.shards import MeshShards
from shardlib.optim.storing import Storing, optimizer_shard
from shardlib.optim.train_state import OptimizerState
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.landing import Landing
from shardlib.sharded.tree import Sharded


class Updates:
    """The updates of one train step's states.

    Raises:
        IllegalComposition: an optimizer that is not elementwise, with states in two memories.
    """

    def __init__(self, optimizer: GradientTransformation, plan: Plan, mesh: Mesh) -> None:
        self._optimizer, self._plan, self._mesh = optimizer, plan, mesh
        self._separation = Separation(plan)
        self._groups = _groups(optimizer, plan)
        self._resting = resting_of(optimizer, plan, mesh)
        self._shards = [MeshShards(plan, mesh).of(group) for group in self._groups]
        # The last group is in the other memory, if there is one: numbers for it must not take the device's link.
        self._numbers = mesh.device_for(self._groups[-1][0].memory.optimizer) if plan.trained else mesh.device
        # Two: while the parameters of one group are on their way, the next group is updated.
        self._slots = [Slot(mesh.transfers.apart) for _ in self._groups[:2]]

    def require_copies(self) -> None:
        """Refuse states of which there is one at a time, in a step that is to keep the state it is given."""
        if not self._resting.at_once:
            raise IllegalComposition(
                "donate=False keeps the old state of every step, and states on disk are there once: leave donate=True, or "
                "keep them in memory with offload('host')"
            )

    def init(self, params: Sharded) -> OptimizerState:
        """The masters and the optimizer's state of new parameters."""
        shards, states = MeshShards(self._plan, self._mesh), []
        several = len(self._groups) > 1 and not self._resting.at_once
        for group in self._groups if several else [self._plan.trained]:
            # The optimizer is shown all parameters, those of other groups without memory.
            flat = {
                bucket.name: torch.empty(bucket.owned, dtype=bucket.master_dtype or bucket.dtype, device="meta")
                for bucket in self._plan.trained
            }
            masters = {}
            for bucket in group:
                flat[bucket.name] = shard = optimizer_shard(params, bucket)
                if bucket.master_dtype is not None:
                    master = self._mesh.zeros(bucket.owned, bucket.master_dtype, bucket.memory.optimizer)
                    flat[bucket.name] = masters[bucket.name] = master.copy_(shard)
            state = OptimizerState(masters, self._optimizer.init(flat, shards=shards))
            if several:
                state = self._separation.cut(state, [bucket.name for bucket in group])
            states.append(self._resting.asleep(state))
        self._resting.commit()
        return self._joined(states)

    @naming("the optimizer")
    def apply(
        self,
        params: Sharded,
        opt: OptimizerState,
        grads: dict[str, torch.Tensor],
        shards: MeshShards,
        *,
        scale: float | None,
        squares: float,
        landing: Landing,
    ) -> OptimizerState:
        """Write the next parameters and optimizer state in place.

        Args:
            grads: bucket name -> gradient in the optimizer's memory, once ``landing`` says so.
            scale: the factor of the gradients; None for 1.
            squares: Σ of the squares of ``grads`` over all ranks.
        """
        with torch.no_grad():
            shards.remember(sum_of_squares, grads, _number(squares, self._numbers))
            factor = None if scale is None else _number(scale, self._numbers)
            storing = Storing(params)
            several = len(self._groups) > 1
            if several:
                factor = self._optimizer.lead(grads, factor, shards)
            states = []
            resting = self._resting.awake(self._parts(opt))
            for group, some, state in zip(self._groups, self._shards if several else [shards], resting, strict=True):
                after = self._update(group, storing, params, state, grads, factor, some, landing)
                states.append(self._resting.asleep(after))
            storing.finish()
            self._resting.commit()
        return self._joined(states)

    def _parts(self, opt: OptimizerState) -> list[OptimizerState]:
        """The state of each group."""
        if len(self._groups) == 1:
            return [opt]
        return [self._separation.cut(opt, [bucket.name for bucket in group]) for group in self._groups]

    def _joined(self, states: Sequence[OptimizerState]) -> OptimizerState:
        """The state of which groups have ``states``."""
        return self._separation.join(states) if len(states) > 1 else states[0]

    def _update(
        self,
        group: Sequence[Bucket],
        storing: Storing,
        params: Sharded,
        opt: OptimizerState,
        grads: dict[str, torch.Tensor],
        factor: torch.Tensor | None,
        shards: MeshShards,
        landing: Landing,
    ) -> OptimizerState:
        """Update the buckets of one group; ``opt`` is their part of the state, and so is the result."""
        names = [bucket.name for bucket in group]
        written, copies, slot = {}, {}, self._slot(group)
        for bucket in group:
            landing.wait(bucket.name)
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
        if len(self._groups) > 1:
            some = {name: grads[name] for name in names}
            factor = None if factor is None else _number(float(factor), written[names[0]].device)
            after = self._optimizer.body(written, some, opt.inner, scale=factor, shards=shards, copies=copies)
        else:
            after = self._optimizer.apply(written, grads, opt.inner, scale=factor, shards=shards, copies=copies)
        for bucket in group:
            shard = copies[bucket.name]
            if self._lent(bucket) and shard is opt.masters[bucket.name]:
                own = (
                    slot.take(bucket.owned, bucket.dtype) if self._crosses(bucket) else optimizer_shard(params, bucket)
                )
                shard = own.copy_(shard)
            slot.sent(storing.put(bucket, shard))
        return OptimizerState(opt.masters, after)

    def _lent(self, bucket: Bucket) -> bool:
        """Whether the master's memory is another's as soon as the update is done."""
        return MEMORIES[bucket.memory.optimizer].rests

    def _crosses(self, bucket: Bucket) -> bool:
        """Whether new parameters are written in one memory, beside the master of another dtype, and stored in another."""
        works, stored = MEMORIES[bucket.memory.optimizer].works, bucket.memory.param
        return self._mesh.transfers.apart and works != stored

    def _slot(self, group: Sequence[Bucket]) -> Slot:
        """Memory for the group's new parameters: the slots take turns."""
        self._slots.append(self._slots.pop(0))
        staged = [
            bucket
            for bucket in group
            if self._crosses(bucket) and (bucket.master_dtype != bucket.dtype or self._lent(bucket))
        ]
        return self._slots[-1].empty(sum(taken(bucket.owned, bucket.dtype) for bucket in staged))


def _groups(optimizer: GradientTransformation, plan: Plan) -> list[tuple[Bucket, ...]]:
    """The buckets that are updated together, in the order of their updates."""
    elsewhere = [bucket for bucket in plan.trained if bucket.memory.optimizer != "device"]
    on_device = tuple(bucket for bucket in plan.trained if bucket.memory.optimizer == "device")
    if not elsewhere or not (optimizer.separable or on_device):
        return [plan.trained]
    if not optimizer.separable:
        raise IllegalComposition(
            f"offload leaves the states of {len(on_device)} of {len(plan.trained)} buckets on the device, and this optimizer "
            "reads across parameters, so that it needs all of them in one memory; use offload(fraction=1.0)"
        )
    return [*([on_device] if on_device else []), *((bucket,) for bucket in reversed(elsewhere))]


def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64, device=device)

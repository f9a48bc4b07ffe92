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
from typing import Any

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.staging import Slot, taken
from shardlib.mesh.transport.activity import naming
from shardlib.optim.base import GradientTransformation
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
        self._shards = [MeshShards(plan, mesh).of(group) for group in self._groups]
        # The last group is in the other memory, if there is one: numbers for it must not take the device's link.
        self._numbers = mesh.device_for(self._groups[-1][0].memory.optimizer) if plan.trained else mesh.device
        # Two: while the parameters of one group are on their way, the next group is updated.
        self._slots = [Slot(mesh.transfers.apart) for _ in self._groups[:2]]

    def init(self, params: Sharded) -> OptimizerState:
        """The masters and the optimizer's state of new parameters."""
        masters, flat = {}, {}
        for bucket in self._plan.trained:
            flat[bucket.name] = shard = optimizer_shard(params, bucket)
            if bucket.master_dtype is not None:
                master = self._mesh.zeros(bucket.owned, bucket.master_dtype, bucket.memory.optimizer)
                flat[bucket.name] = masters[bucket.name] = master.copy_(shard)
        return OptimizerState(masters, self._optimizer.init(flat, shards=MeshShards(self._plan, self._mesh)))

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
            if len(self._groups) > 1:
                factor = self._optimizer.lead(grads, factor, shards)
                states = [
                    self._update(group, storing, params, opt, grads, factor, some, landing)
                    for group, some in zip(self._groups, self._shards, strict=True)
                ]
                inner = self._separation.join(states)
            else:
                inner = self._update(self._groups[0], storing, params, opt, grads, factor, shards, landing)
            storing.finish()
        return OptimizerState(opt.masters, inner)

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
    ) -> Any:
        """Update the buckets of one group; returns their part of the optimizer's state."""
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
            some, state = {name: grads[name] for name in names}, self._separation.cut(opt.inner, names)
            factor = None if factor is None else _number(float(factor), written[names[0]].device)
            after = self._optimizer.body(written, some, state, scale=factor, shards=shards, copies=copies)
        else:
            after = self._optimizer.apply(written, grads, opt.inner, scale=factor, shards=shards, copies=copies)
        for bucket in group:
            slot.sent(storing.put(bucket, copies[bucket.name]))
        return after

    def _crosses(self, bucket: Bucket) -> bool:
        """Whether new parameters are written in one memory, beside the master of another dtype, and stored in another."""
        return self._mesh.transfers.apart and bucket.memory.optimizer != bucket.memory.param

    def _slot(self, group: Sequence[Bucket]) -> Slot:
        """Memory for the group's new parameters: the slots take turns."""
        self._slots.append(self._slots.pop(0))
        staged = [bucket for bucket in group if self._crosses(bucket) and bucket.master_dtype != bucket.dtype]
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

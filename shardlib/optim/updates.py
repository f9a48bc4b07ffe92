"""The update of a train state: which buckets are updated when, and from which gradients. `group_update` makes each.

Where the optimizer works in another memory than the parameters lie in, an elementwise optimizer takes one bucket after the
other, in the order in which gradients land, so that the first new parameters are on their way while later gradients arrive:

    gradients      land 3 | land 2 | land 1 |
    update                 |  3    |  2    |  1    |
    parameters                     | up 3  | up 2  | up 1  |

Clips that come first in a chain take their factor from the squares that were summed as the gradients landed. An optimizer
that reads across elements otherwise updates all buckets at once, where their states lie; or, if they rest on disk, one after
the other, and all ranks make the exchanges of each bucket.

Updates that run ahead (`shardlib.optim.ahead`) are made as each gradient lands, with the factor that gradients have where
nothing is clipped; or, delayed, from the gradients of the step before, whose factor is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.collectives.summation import sum_of_squares
from shardlib.common.devices import cloned
from shardlib.common.environment import timed
from shardlib.errors import IllegalComposition
from shardlib.mesh.memories import AHEAD, Transfer
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.optim.ahead import Ahead
from shardlib.optim.base import GradientTransformation
from shardlib.optim.group_update import GroupUpdate, scalar, update_groups
from shardlib.optim.on_disk import in_files
from shardlib.optim.separate import Separation, separate_memory
from shardlib.optim.shards import MeshShards
from shardlib.optim.state_storage import RolledBack, state_storage
from shardlib.optim.storing import Storing, optimizer_shard
from shardlib.optim.train_state import OptimizerState, Pending, copied
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.gradient_offload import Follower, GradientOffload
from shardlib.sharded.gradients_on_disk import DiskGradientOffload, GradientsOnDisk, gradients_rest
from shardlib.sharded.params_on_disk import BufferOnDisk
from shardlib.sharded.tree import Sharded


class Updates:
    """The updates of one train step's states.

    Args:
        donates: whether a step may reuse the memory of the state it is given.

    Attributes:
        alone: whether a state cannot be kept beside the next one.

    Raises:
        IllegalComposition: an optimizer that is not elementwise, with states in two memories or updates that run ahead; or
            states of which there is one at a time, in a step that is to keep the state it is given.
    """

    def __init__(self, optimizer: GradientTransformation, plan: Plan, mesh: Mesh, donates: bool = True) -> None:
        self._optimizer, self._plan, self._mesh, self._donates = optimizer, plan, mesh, donates
        self._separation = Separation(plan)
        self._groups = update_groups(optimizer, plan)
        self.alone: bool = in_files(plan)
        if self.alone and not donates:
            raise IllegalComposition(
                "donate=False keeps the old state of every step, and what is on disk is there once: leave donate=True, or "
                "keep it in memory with offload('host')"
            )
        self._storage = state_storage(optimizer, plan, mesh)
        try:
            self._scratch = GradientsOnDisk(plan, mesh) if gradients_rest(plan) else None
        except BaseException:
            self._storage.close()  # for the next attempt, while this one's traceback is held
            raise
        self._separate = optimizer.in_turn(plan)
        self._shards = [MeshShards(plan, mesh).of(group, optimizer.rest) for group in self._groups]
        self._shards_of = {group[0].name: of for group, of in zip(self._groups, self._shards, strict=True) if group}
        self._ahead = Ahead(self._body, mesh.device, donates) if plan.step.ahead else None
        self._delays = plan.step.update == "delay"
        self._landed: dict[str, torch.Tensor] = {}  # memory for the next step's gradients
        # The last group is in the other memory, if there is one: numbers for it must not take the device's link.
        self._numbers = mesh.device_for(self._groups[-1][0].memory.optimizer) if plan.trained else mesh.device
        self._update = GroupUpdate(optimizer, mesh, self._groups, self._separate)
        mesh.kept.add(self)

    def init(self, params: Sharded) -> OptimizerState:
        """The masters and the optimizer's state of new parameters."""
        states: list[OptimizerState] = []
        self._storage.attempt(lambda _: states.extend(self._first(params)))
        opt = self._joined(states)
        if not self._delays:
            return opt
        grads = {b.name: self._mesh.zeros(b.owned, b.reduce_dtype, b.memory.optimizer) for b in self._plan.trained}
        return opt._replace(
            pending=Pending(grads, scalar(1.0, self._numbers), torch.tensor(False, device=self._numbers))
        )

    def _first(self, params: Sharded) -> Iterator[OptimizerState]:
        """The first state of each group, given to the storage."""
        shards = MeshShards(self._plan, self._mesh)
        several = len(self._groups) > 1 and self._storage.files is not None
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
            state = OptimizerState(masters, separate_memory(self._optimizer.init(flat, shards=shards), flat.values()))
            if several:
                state = self._separation.cut(state, [bucket.name for bucket in group])
            yield self._storage.swap_out(state)

    def begin(self, params: Sharded, opt: OptimizerState, scale: float | None) -> Follower | None:
        """Begin a step; returns what is to follow its gradients.

        Args:
            scale: the scale that gradients are expected to have.
        """
        self._storage.require(opt)
        if self._ahead is None:
            return None
        parts = zip(self._groups, self._parts(opt), strict=True)
        ahead = {group[0].name: part for group, part in parts if self._runs_ahead(group)}
        if not self._delays:
            with torch.no_grad():
                self._ahead.prepare(params, ahead, self._factor({}, MeshShards(self._plan, self._mesh), scale, 0.0))
            return self._ahead
        pending = _pending(opt)
        self._ahead.prepare(params, ahead, pending.factor)
        if pending.due:
            for group in self._groups:
                for bucket in group:
                    self._ahead.landed(bucket, pending.grads[bucket.name], Transfer())
        return None

    def landing(self, unreduced: tuple[str, ...], follower: Follower | None) -> GradientOffload:
        """The landing of a step's gradients, in what steps share: memory, or files."""
        if self._scratch is not None:
            return DiskGradientOffload(self._plan, self._mesh, unreduced, self._scratch)
        return GradientOffload(self._plan, self._mesh, unreduced, self._landed, follower)

    def changes(self, opt: OptimizerState, taken: bool) -> bool:
        """Whether the step changes parameters, if its gradients are ``taken``."""
        return bool(_pending(opt).due) if self._delays else taken

    @property
    def undone(self) -> int:
        """The number of buckets whose update of this step was made ahead in vain."""
        return 0 if self._ahead is None else self._ahead.undone

    @naming("the optimizer")
    def apply(
        self,
        params: Sharded,
        opt: OptimizerState,
        grads: Mapping[str, torch.Tensor],
        shards: MeshShards,
        *,
        taken: bool,
        scale: float | None,
        squares: float,
        landing: GradientOffload,
        used: frozenset[str] | None = None,
    ) -> OptimizerState:
        """Write the next parameters in place; returns the next optimizer state.

        Args:
            grads: bucket name -> gradient in the optimizer's memory, once ``landing`` says so.
            taken: whether the gradients are to be used.
            scale: the factor of the gradients; None for 1.
            squares: Σ of the squares of ``grads`` over all ranks.
            used: see `Shards`.

        Raises:
            RolledBack: it failed on some rank, and parameters and states are as they were on all.
        """
        for each in (shards, *self._shards):
            each.used = used
        with torch.no_grad(), timed("optimizer"):
            factor = self._factor(grads, shards, scale, squares) if taken else None
            if self._delays:
                pending = _pending(opt)
                if pending.due:
                    opt = self._applied(params, opt, pending.grads, shards, pending.factor, landing)
                landing.wait_for_all()
                opt = opt._replace(pending=self._delayed(pending, grads, factor) if taken else _applied(pending))
            elif taken:
                opt = self._applied(params, opt, grads, shards, factor, landing)
            else:
                opt = self._storage.skipped(opt, params)
        return opt

    def end(self) -> None:
        """End a step, also one that raised."""
        if self._ahead is not None:
            self._ahead.end()

    def give_back(self) -> None:
        """Free the host memory that is kept for the next step, which makes it anew."""
        self._landed.clear()
        self._update.give_back()
        if self._ahead is not None:
            self._ahead.give_back()

    def _delayed(self, before: Pending, grads: Mapping[str, torch.Tensor], factor: torch.Tensor | None) -> Pending:
        """What the next step applies. The next gradients land where those ``before`` are, if they may."""
        free = before.grads if self._donates and self._mesh.transfers.apart else {}
        self._landed = {name: kept for name, kept in self._landed.items() if name not in grads} | free
        grads = {name: grad if _fills(grad) else cloned(grad) for name, grad in grads.items()}
        factor = scalar(1.0, self._numbers) if factor is None else factor
        return Pending(grads, factor, torch.ones_like(before.due))

    def _factor(
        self, grads: Mapping[str, torch.Tensor], shards: MeshShards, scale: float | None, squares: float
    ) -> torch.Tensor | None:
        """The factor of all gradients, clips included where buckets are updated one by one."""
        shards.remember(sum_of_squares, grads, scalar(squares, self._numbers))
        factor = None if scale is None else scalar(scale, self._numbers)
        return self._optimizer.lead(grads, factor, shards) if self._separate else factor

    def _applied(
        self,
        params: Sharded,
        opt: OptimizerState,
        grads: Mapping[str, torch.Tensor],
        shards: MeshShards,
        factor: torch.Tensor | None,
        landing: GradientOffload,
    ) -> OptimizerState:
        """The state after an update, whose parameters are written in place."""
        storing, states = Storing(params), list[OptimizerState]()
        if self._ahead is not None:
            self._complete(self._ahead, factor)

        def update(parts: Iterator[OptimizerState]) -> None:
            some_of = self._shards if self._separate else [shards]
            with contextlib.closing(landing.arriving(grads, self._groups)) as arriving:
                turns = zip(self._groups, some_of, parts, arriving, strict=True)
                for number, (group, some, state, landed) in enumerate(turns, 1):
                    self._announce(params, self._groups[number : number + AHEAD])
                    after = self._made_ahead(group, storing)
                    if after is None:
                        state = state if self._donates else copied(state)
                        slot = self._ahead.slot(group[0]) if self._ahead and self._runs_ahead(group) else None
                        after = self._update.run(group, storing, state, landed, factor, some, landing, slot)
                    states.append(self._storage.swap_out(after))

        parts = self._parts(opt)
        for some in self._shards:
            some.exchanges.begin()  # not in `update`: an attempt may fail before it
        self._storage.attempt(update, parts, params, lambda error: self._join_collectives(error, parts, storing))
        storing.finish()
        return self._joined(states)

    def _join_collectives(self, error: Exception, parts: Sequence[OptimizerState], storing: Storing) -> None:
        """On a rank whose update has failed: take part in what other ranks' updates exchange on their way.

        Args:
            error: why it has failed, which is reported.
            parts: the groups' states before the update.
        """
        for number, (group, shards) in enumerate(zip(self._groups, self._shards, strict=True)):
            if self._separate and not self._optimizer.separable:
                try:
                    self._update.imitate(group, parts[number], shards)
                except Exception as other:
                    if type(other) is not type(error):
                        error.add_note(
                            f"Exchanges that other ranks wait for were not made: {type(other).__name__}: {other}"
                        )
            storing.join_collectives([group])

    def _runs_ahead(self, group: Sequence[Bucket]) -> bool:
        return self._ahead is not None and any(bucket.memory.optimizer != "device" for bucket in group)

    def _complete(self, ahead: Ahead, factor: torch.Tensor | None) -> None:
        """Return once the updates ahead are made on all ranks: what follows writes parameters."""
        failure, problems, _ = attempted(self._mesh, lambda: ahead.complete(factor))
        if problems:
            raise RolledBack(error_of(failure, problems, "the step was not made"))

    def _made_ahead(self, group: Sequence[Bucket], storing: Storing) -> OptimizerState | None:
        """The state of a bucket that was updated ahead; its parameters are on their way."""
        if self._ahead is None or not self._runs_ahead(group):
            return None
        (bucket,) = group
        updated = self._ahead.result(bucket)
        if updated is None:
            return None
        self._ahead.sent(bucket, storing.put(bucket, updated.shard))
        return updated.opt

    def _body(
        self,
        bucket: Bucket,
        params: torch.Tensor,
        grad: torch.Tensor,
        inner: Any,
        factor: torch.Tensor | None,
        copy: torch.Tensor,
        old: tuple[torch.Tensor, Any],
    ) -> Any:
        """See `Ahead`."""
        name = bucket.name
        factor = None if factor is None else scalar(float(factor), params.device)
        return self._optimizer.body(
            {name: params},
            {name: grad},
            inner,
            scale=factor,
            shards=self._shards_of[name],
            copies={name: copy},
            old=({name: old[0]}, old[1]),
        )

    def _announce(self, params: Sharded, groups: Sequence[Sequence[Bucket]]) -> None:
        """Let parameters on disk that are updated in place be read while earlier groups are updated."""
        for bucket in (bucket for group in groups for bucket in group if bucket.master_dtype is None):
            for part in params.parts(bucket):
                if isinstance(part, BufferOnDisk):
                    part.announce()

    def _parts(self, opt: OptimizerState) -> list[OptimizerState]:
        """The state of each group."""
        opt = opt._replace(pending=())
        if not self._separate:
            return [opt]
        return [self._separation.cut(opt, [bucket.name for bucket in group]) for group in self._groups]

    def _joined(self, states: Sequence[OptimizerState]) -> OptimizerState:
        """The state of which groups have ``states``."""
        return self._separation.join(states) if len(states) > 1 else states[0]


def _pending(opt: OptimizerState) -> Pending:
    assert isinstance(opt.pending, Pending)  # updates are delayed
    return opt.pending


def _applied(pending: Pending) -> Pending:
    """``pending`` once it was applied, where nothing follows it."""
    return pending._replace(due=torch.zeros_like(pending.due))


def _fills(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps no memory but its own elements'."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize

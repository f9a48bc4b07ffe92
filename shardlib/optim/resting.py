"""Where masters and optimizer states are between updates: where the optimizer works on them, or on disk.

An update is an `attempt`: it is given the states of its groups of buckets one after the other, and gives each back
(`asleep`). States that stay where they are worked on pass through unchanged. States on disk are read groups ahead, written
behind, and become the next step's on all ranks or on none. In a train state `OnDisk` leaves stand for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import optree
import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.common._compat import storage_id
from shardlib.errors import IllegalComposition, StorageError, TreeError
from shardlib.mesh.memories import MEMORIES, window
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import GradientTransformation
from shardlib.optim.on_disk import Committing, OnDisk, follow, followed, rests
from shardlib.optim.storing import Storing, optimizer_shard
from shardlib.optim.train_state import OptimizerState
from shardlib.optim.undone import Undone
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, close_with, open_for_run
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, leaves_of, path_name, tree_map, unflatten

Update = Callable[[Iterator[OptimizerState]], None]


class StepFiles(Committing, Protocol):
    """Files that a step writes."""

    def settle(self) -> None:
        """Commit what was written since the last step, so that the next one can be taken back to it."""
        ...

    def flush(self) -> None:
        """Wait for what is being written; raises an error if something could not be."""
        ...


class Resting:
    """The states of groups of buckets, between and during updates: they stay where the optimizer works on them, and are
    updated in place. Parameters may be on disk.

    Attributes:
        at_once: whether there is memory for all states at once.
        in_place: the states that updates cannot take back, in words; empty if there are none.
    """

    at_once = True
    in_place = "they"

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def require(self, state: OptimizerState) -> None:
        """Refuse a state that an update could not start from.

        Raises:
            TreeError: it rests in the files of another train step.
            DonatedStateError: a later state has been written over it.
        """

    def attempt(
        self,
        update: Update,
        groups: Sequence[OptimizerState] = (),
        params: Sharded | None = None,
        go_along: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Run an update: on all ranks, or on none where it can be taken back.

        Args:
            update: is given the groups' states as tensors, one after the other, and gives each back before the next.
            params: what the update writes; None while first states are made.
            go_along: called with the error where the update fails, so that other ranks reach the end of theirs.

        Raises:
            Undone: it failed on some rank, and was taken back on all.
        """
        on_disk = None if params is None else params.on_disk
        files = [*self._files(), *([] if on_disk is None else [on_disk])]
        if not files:
            update(iter(groups))
            return
        following, groups = groups, [followed(group) for group in groups]
        begun = fits = False

        def settle() -> None:
            for each in files:
                each.settle()

        def work() -> None:
            nonlocal begun, fits
            try:
                settle()
                begun = True
                if follow(following):
                    settle()  # before parameters are written: those that go back are what their masters round to
                fits = True
                with contextlib.closing(self._awoken(groups)) as states:
                    update(states)
            except Exception as error:
                go_along(error)
                raise
            for each in files:
                each.flush()

        def take_back() -> None:
            for each in files:
                each.roll_back()
            if not begun:
                raise StorageError("what the step was to start from could not be written before")
            if params is not None and on_disk is None and fits and not self.in_place:
                _as_before(params, groups)

        failure, problems, _ = attempted(self._mesh, work)
        if not problems:
            for each in files:
                each.commit()
            return
        error = error_of(failure, problems, "the step was not made")
        _, lost, _ = attempted(self._mesh, take_back)
        if params is None:
            raise error
        why = lost[0][1] if lost else self.in_place and f"{self.in_place} were updated in place"
        if why:
            error.add_note(f"The states are lost ({why}): restore a checkpoint")
            raise error
        raise Undone(error, fits)

    def _files(self) -> Sequence[StepFiles]:
        """What an update writes beside parameters."""
        return ()

    def _awoken(self, groups: Sequence[OptimizerState]) -> Generator[OptimizerState]:
        """The groups' states as tensors."""
        yield from groups

    def skipped(self, state: OptimizerState, params: Sharded) -> OptimizerState:
        """The state after a step without an update."""
        return state

    def asleep(self, state: OptimizerState) -> OptimizerState:
        """A group's state, given back after its update or its first values; the result belongs into a train state."""
        return state

    def close(self) -> None:
        """Close the files, of a train step that is not made."""


class StatesOnDisk(Resting):
    """The states of all buckets whose memory rests on disk.

    They are this run's alone: another one starts from a checkpoint, so that a step waits for its writes and for no sync of
    the disk. The files hold the states before a step until it is made on every rank. A step that fails is taken back: its
    states are, and parameters that it has written become what their masters round to, as they were.

    Args:
        planned: the masters and the optimizer's state as tensors without memory.

    Attributes:
        store: the files.
        version: the number of the states that they hold.
    """

    at_once = False

    def __init__(self, plan: Plan, mesh: Mesh, planned: OptimizerState) -> None:
        buffers: dict[str, Flat] = {}
        sizes: dict[str, int] = {}
        tree: Any = planned
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            named = plan.numbering.run_along(path)
            if named is not None and leaf.dim() and MEMORIES[plan.bucket_of[named[0]].memory.optimizer].rests:
                flat = buffers[path_name(path)] = Flat(leaf.numel(), leaf.dtype)
                sizes[named[0]] = sizes.get(named[0], 0) + flat.padded
        assert plan.claims is not None  # they say that the states are on disk
        folders = plan.claims.location("optimizer").folders
        super().__init__(mesh)
        self._buffers, self._awake = buffers, dict[str, torch.Tensor]()
        all_rest = all(MEMORIES[bucket.memory.optimizer].rests for bucket in plan.everywhere.trained)
        self.in_place = "" if all_rest else "those in memory"
        self.version, self._given_back = 0, False
        problem = "the files for states on disk could not be opened"
        self.store = open_for_run(mesh, folders, buffers, window(list(sizes.values())), problem)
        close_with(self, self.store)
        mesh.kept.add(self.store)

    def require(self, state: OptimizerState) -> None:
        for leaf in leaves_of(followed(state)):
            if isinstance(leaf, OnDisk) and leaf.store is not self.store:
                raise TreeError(
                    "this state lies on disk in the files of another train step, which alone can update it: go on with that "
                    "step, or save a checkpoint of the state and restore it into the state that was made with this step"
                )

    def skipped(self, state: OptimizerState, params: Sharded) -> OptimizerState:
        after = followed(state)
        if any(now is not before for now, before in zip(leaves_of(after), leaves_of(state), strict=True)):
            self.attempt(lambda _: None, [state], params)
        return after

    def close(self) -> None:
        self.store.close()

    def _files(self) -> Sequence[StepFiles]:
        return [self]

    def settle(self) -> None:
        self.commit()

    def flush(self) -> None:
        self.store.flush()

    def commit(self) -> None:
        self.store.commit((self.store.step or 0) + 1)
        self.version += self._given_back
        self._given_back = False

    def roll_back(self) -> None:
        self.store.roll_back()
        self._given_back = False

    def _awoken(self, groups: Sequence[OptimizerState]) -> Generator[OptimizerState]:
        resting = [[leaf.name for leaf in leaves_of(group) if isinstance(leaf, OnDisk)] for group in groups]
        with contextlib.closing(self.store.fetched(resting)) as fetched:
            for group, tensors in zip(groups, fetched, strict=True):
                self._awake = tensors
                try:
                    yield tree_map(self._tensor, group)
                finally:  # of an update that failed
                    for lent in self._awake.values():
                        self.store.release(lent)

    def _tensor(self, leaf: Any) -> Any:
        return self._awake[leaf.name].view(leaf.shape) if isinstance(leaf, OnDisk) else leaf

    def asleep(self, state: OptimizerState) -> OptimizerState:
        paths, leaves, treedef = flatten(state)
        leaves = [self._apart(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        self._given_back, version = True, self.version + 1  # that of the commit
        after = []
        for path, leaf in zip(paths, leaves, strict=True):
            if path not in self._buffers:
                after.append(leaf)
                continue
            lent, flat = self._awake.get(path), leaf.reshape(-1)
            if lent is not None and flat.data_ptr() != lent.data_ptr():
                flat = lent.copy_(flat)
            self._awake.pop(path, None)  # the store's again
            self.store.write(path, flat)
            after.append(OnDisk(self, version, path, leaf.shape, self._buffers[path]))
        return unflatten(treedef, after)

    def _apart(self, path: str, leaf: Any) -> Any:
        """A leaf in memory that giving back the others does not change: an update may return an old leaf as another one."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = self._awake.get(path)
        if own is not None and leaf.data_ptr() == own.data_ptr():
            return leaf
        lent = {storage_id(block.untyped_storage()) for block in self._awake.values()}
        return leaf.clone() if storage_id(leaf.untyped_storage()) in lent else leaf


def _as_before(params: Sharded, groups: Iterable[OptimizerState]) -> None:
    """Give stored parameters the values of their masters."""
    storing = Storing(params)
    masters: dict[str, Any] = {name: master for group in groups for name, master in group.masters.items()}
    for name, master in masters.items():
        bucket = params.plan.bucket_of[name]
        if bucket.owners(bucket.param_level) == 1:
            storing.put(bucket, master.unpacked()).wait()
        else:  # not gathered yet; a bucket of one leaf may have the new shard, of which this is a view
            optimizer_shard(params, bucket).copy_(master.unpacked())


def resting_of(optimizer: GradientTransformation, plan: Plan, mesh: Mesh) -> Resting:
    """How the states of a train step rest between its updates.

    Raises:
        IllegalComposition: states on disk, and an optimizer that needs all of them at once.
        StorageError: the folders are in use, hold another plan's states, or have too little space.
    """
    if not rests(plan):
        return Resting(mesh)
    if fault := fault_on_disk(optimizer, plan):
        raise IllegalComposition(fault)
    inner, _ = optimizer.planned(plan)
    masters = {
        bucket.name: torch.empty(bucket.owned, dtype=bucket.master_dtype, device="meta")
        for bucket in plan.trained
        if bucket.master_dtype is not None
    }
    return StatesOnDisk(plan, mesh, OptimizerState(masters, inner))


def fault_on_disk(optimizer: GradientTransformation, plan: Plan) -> str | None:
    """Why an optimizer of a plan's parameters cannot have its states on disk; None if it can."""
    if not optimizer.by_leaf:
        if optimizer.owns:
            why, remedy = "sums gradients itself", ""
        elif optimizer.locality is None:
            why, remedy = "declares no locality", "pass locality= (sl.optim.Locality) where it has a narrow one, or "
        else:
            why = "reads across parameters"
            remedy = "put clips first in a chain, take make_train_step(nonfinite='skip') for skip_nonfinite, or "
        return (
            f"offload keeps states on disk, of which a few buckets are in memory at a time, and this optimizer {why}, so "
            f"that it needs all of them; {remedy}use offload('host')"
        )
    if plan.everywhere.stages.axes and not optimizer.separable:
        return (
            "offload keeps states on disk, and this optimizer sums over each parameter while its bucket is in memory, in "
            "exchanges of all ranks; the stages of a pipeline have different buckets. Use offload('host'), or an elementwise "
            "optimizer, such as adamw"
        )
    return None

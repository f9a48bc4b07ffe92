"""State storage: where masters and optimizer states are between updates, where the optimizer works on them or on disk.

An update is an `attempt`: it is given the states of its groups of buckets one after the other, and gives each back
(`swap_out`). States that stay where they are worked on pass through unchanged. States on disk are read groups ahead, written
behind, and become the next step's on all ranks or on none. In a train state `OnDisk` leaves stand for them.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import optree
import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.common._compat import storage_id
from shardlib.errors import IllegalComposition, StorageError, TreeError
from shardlib.mesh.memories import MEMORIES, window
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import GradientTransformation
from shardlib.optim.on_disk import OnDisk, rests, without_changes, write_changes
from shardlib.optim.storing import Storing, optimizer_shard
from shardlib.optim.train_state import OptimizerState, TrainState, require_state
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, TieredBuffers
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, leaves_of, path_name, tree_map, unflatten

Update = Callable[[Iterator[OptimizerState]], None]


class RolledBack(Exception):
    """An update that failed on some rank, and was not made, or taken back, on all.

    Attributes:
        error: why, for the caller of the step.
        fits: whether this rank's copies of parameters follow the parameters of the step's state now.
    """

    error: Exception
    fits: bool

    def __init__(self, error: Exception, fits: bool = False) -> None:
        super().__init__(str(error))
        error.add_note("The state that the step was given is as it was: it can be saved, and used again")
        self.error, self.fits = error, fits


def restore_on_failure(train_step: Callable[[TrainState, Any], Any]) -> Callable[[TrainState, Any], Any]:
    """``train_step``, whose state is its caller's again if its update is rolled back, and says so if it is lost."""

    @functools.wraps(train_step)
    def step(state: TrainState, batch: Any) -> Any:
        give_back = require_state("a train step", state, batch).keeping()
        try:
            return train_step(state, batch)
        except RolledBack as failure:
            error, fits = failure.error, failure.fits
        except BaseException as failure:
            state.lost_to(failure)
            raise
        give_back()
        if fits:
            state.fitting()
        raise error

    return step


@contextlib.contextmanager
def interrupted_after() -> Iterator[None]:
    """A context whose code ends before Ctrl-C, or a notebook's stop button, raises. A second one raises at once.

    Signals come to the main thread alone. A handler of the program's own, which need not raise, stays.
    """
    raises = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not raises:
        yield
        return
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, raises)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raises)
    if came:
        raise KeyboardInterrupt


class StateStorage:
    """The states of groups of buckets, between and during updates. Parameters may be on disk too.

    States on disk are this run's alone: another one starts from a checkpoint, so that a step waits for its writes and for no
    sync of the disk. The files hold the states before a step until it is made on every rank. A step that fails is taken back:
    its states are, and parameters that it has written become what their masters round to, as they were.

    Args:
        planned: the masters and the optimizer's state as tensors without memory.

    Attributes:
        files: the files of states; None where all stay where the optimizer works on them, and are updated in place.
        in_place: the states that updates cannot take back, in words; empty if there are none.

    Raises:
        StorageError: the folders are in use, hold another plan's states, or have too little space.
    """

    in_place: str

    def __init__(self, plan: Plan, mesh: Mesh, planned: OptimizerState | None = None) -> None:
        self._mesh = mesh
        self.files: TieredBuffers | None = None
        self.in_place = "they"
        self._flats: dict[str, Flat] = {}
        self._swapped_in: dict[str, torch.Tensor] = {}  # the present group's memory in the store
        if planned is None:
            return
        sizes: dict[str, int] = {}
        tree: Any = planned
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            named = plan.numbering.run_along(path)
            if named is not None and leaf.dim() and MEMORIES[plan.bucket_of[named[0]].memory.optimizer].rests:
                flat = self._flats[path_name(path)] = Flat(leaf.numel(), leaf.dtype)
                sizes[named[0]] = sizes.get(named[0], 0) + flat.padded
        all_rest = all(MEMORIES[bucket.memory.optimizer].rests for bucket in plan.everywhere.trained)
        self.in_place = "" if all_rest else "those in memory"
        self.files = TieredBuffers(plan, mesh, "optimizer", self._flats, window(list(sizes.values())))

    def require(self, state: OptimizerState) -> None:
        """Refuse a state that an update could not start from.

        Raises:
            TreeError: it lies in the files of another train step.
            DonatedStateError: a later state has been written over it.
        """
        if self.files is None:
            return
        for leaf in leaves_of(without_changes(state)):
            if isinstance(leaf, OnDisk) and leaf.store is not self.files.store:
                raise TreeError(
                    "this state lies on disk in the files of another train step, which alone can update it. Go on with that "
                    "step, or save a checkpoint and restore it into a state of this one"
                )

    def attempt(
        self,
        update: Update,
        groups: Sequence[OptimizerState] = (),
        params: Sharded | None = None,
        join_collectives: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Run an update: on all ranks, or on none where it can be taken back.

        Args:
            update: is given the groups' states as tensors, one after the other, and gives each back before the next.
            params: what the update writes; None while first states are made.
            join_collectives: called with the error where the update fails, so that other ranks reach the end of theirs.

        Raises:
            RolledBack: it failed on some rank, and was taken back on all.
        """
        written = None if params is None else params.on_disk
        files: list[TieredBuffers] = [] if self.files is None else [self.files]
        if written is not None:
            files.append(written.files)
        if not files:
            update(iter(groups))
            return
        before, groups = groups, [without_changes(group) for group in groups]
        begun = fits = False

        def settle() -> None:
            for each in files:
                each.settle()

        def work() -> None:
            nonlocal begun, fits
            try:
                settle()
                begun = True
                if write_changes(before):
                    settle()  # before parameters are written: those that go back are what their masters round to
                if written is not None:
                    written.files.coming = written.version
                fits = True
                with contextlib.closing(self._swap_in(groups)) as states:
                    update(states)
            except Exception as error:
                join_collectives(error)
                raise
            for each in files:
                each.flush()

        def take_back() -> None:
            for each in files:
                each.roll_back()
            if not begun:
                raise StorageError("what the step was to start from could not be written before")
            if params is not None and written is None and fits and not self.in_place:
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
        raise RolledBack(error, fits)

    def _swap_in(self, groups: Sequence[OptimizerState]) -> Generator[OptimizerState]:
        """The groups' states as tensors."""
        if self.files is None:
            yield from groups
            return
        resting = [[leaf.name for leaf in leaves_of(group) if isinstance(leaf, OnDisk)] for group in groups]
        with contextlib.closing(self.files.store.fetched(resting)) as fetched:
            for group, self._swapped_in in zip(groups, fetched, strict=True):
                try:
                    yield tree_map(self._tensor, group)
                finally:  # of an update that failed
                    for lent in self._swapped_in.values():
                        self.files.store.release(lent)

    def _tensor(self, leaf: Any) -> Any:
        return self._swapped_in[leaf.name].view(leaf.shape) if isinstance(leaf, OnDisk) else leaf

    def swap_out(self, state: OptimizerState) -> OptimizerState:
        """A group's state, given back after its update or its first values; the result belongs into a train state."""
        if self.files is None:
            return state
        paths, leaves, treedef = flatten(state)
        leaves = [self._copy_if_aliased(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        self.files.coming = self.files.version + 1
        after = []
        for path, leaf in zip(paths, leaves, strict=True):
            if path not in self._flats:
                after.append(leaf)
                continue
            lent, flat = self._swapped_in.get(path), leaf.reshape(-1)
            if lent is not None and flat.data_ptr() != lent.data_ptr():
                flat = lent.copy_(flat)
            self._swapped_in.pop(path, None)  # the store's again
            self.files.put(path, flat)
            after.append(OnDisk(self.files, self.files.coming, path, leaf.shape, leaf.dtype))
        return unflatten(treedef, after)

    def _copy_if_aliased(self, path: str, leaf: Any) -> Any:
        """A leaf in memory that giving back the others does not change: an update may return an old leaf as another one."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = self._swapped_in.get(path)
        if own is not None and leaf.data_ptr() == own.data_ptr():
            return leaf
        lent = {storage_id(block.untyped_storage()) for block in self._swapped_in.values()}
        return leaf.clone() if storage_id(leaf.untyped_storage()) in lent else leaf

    def skipped(self, state: OptimizerState, params: Sharded) -> OptimizerState:
        """The state after a step without an update."""
        if self.files is None:
            return state
        after = without_changes(state)
        if any(now is not before for now, before in zip(leaves_of(after), leaves_of(state), strict=True)):
            self.attempt(lambda _: None, [state], params)
        return after

    def close(self) -> None:
        """Close the files, of a train step that is not made."""
        if self.files is not None:
            self.files.close()


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


def state_storage(optimizer: GradientTransformation, plan: Plan, mesh: Mesh) -> StateStorage:
    """The storage of a train step's states.

    Raises:
        IllegalComposition: states on disk, and an optimizer that needs all of them at once.
        StorageError: as of `StateStorage`.
    """
    if not rests(plan):
        return StateStorage(plan, mesh)
    if fault := fault_on_disk(optimizer, plan):
        raise IllegalComposition(fault)
    inner, _ = optimizer.planned(plan)
    masters = {
        bucket.name: torch.empty(bucket.owned, dtype=bucket.master_dtype, device="meta")
        for bucket in plan.trained
        if bucket.master_dtype is not None
    }
    return StateStorage(plan, mesh, OptimizerState(masters, inner))


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
            f"offload has a few buckets' states in memory at a time, and this optimizer {why}, so that it needs all of them; "
            f"{remedy}use offload('host')"
        )
    if plan.everywhere.stages.axes and not optimizer.separable:
        return (
            "offload has one bucket's states in memory, over which this optimizer sums on all ranks, and the stages of a "
            "pipeline have different buckets. Use offload('host'), or an elementwise optimizer, such as adamw"
        )
    return None

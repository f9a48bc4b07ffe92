"""Gradients in files: written behind while backward goes on, and read ahead by the update.

They are a step's scratch: there is one slot for each, nothing is committed, and the next step writes over them. Never are all
gradients in host memory; what lands and what is read pass through a bounded pool.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.memory import resting_gradients
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, PendingRead, Store, close_with, open_for_run
from shardlib.sharded.landing import Landing

_T = TypeVar("_T")
FOLDER = "gradients"  # beside the files of the optimizer's states


class GradientsOnDisk:
    """The files of one rank's gradients.

    Attributes:
        store: the files.
        held: of gradients that are on their way from the device, in order: memory of the store, and the sum so far of what
            the gradient is a further summand of.

    Raises:
        StorageError: the folders are in use, hold other gradients, cannot be written to, or have too little space.
        RankFailure: those of another rank.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        assert plan.claims is not None  # they say that the gradients are on disk
        folders = [Path(folder) / FOLDER for folder in plan.claims.location("grad").folders]
        flats = {bucket.name: Flat(bucket.owned, bucket.reduce_dtype) for bucket in plan.trained if _rests(bucket)}
        problem = "the files for gradients on disk could not be opened"
        self.store: Store = open_for_run(mesh, folders, flats, resting_gradients(plan), problem, slots=1)
        self._apart = mesh.transfers.apart
        self.held: deque[tuple[torch.Tensor, PendingRead | None]] = deque()
        close_with(self, self.store)
        mesh.kept.add(self)

    def begin(self) -> None:
        """Forget the gradients of the step before, also of one that failed on its way."""
        if self.held and self._apart:
            torch.accelerator.synchronize()  # copies may still write there
        while self.held:
            lent, before = self.held.popleft()
            self.store.release(lent)
            if before is not None:
                before.cancel()
        self.store.roll_back()

    def give_back(self) -> None:
        """Free the memory that gradients pass through; the next step makes it anew."""
        self.begin()
        self.store.give_back()


class LandingOnDisk(Landing):
    """The landing of one step's gradients in files. Squares are summed as they land, so that the norm needs no read.

    A sum over micro-batches is read, added to and written again. What fails is raised by `settle`, on all ranks: others would
    wait in the exchanges of backward for a rank that raises there.
    """

    def __init__(self, plan: Plan, mesh: Mesh, unreduced: tuple[str, ...], files: GradientsOnDisk) -> None:
        super().__init__(plan, mesh, unreduced)
        self._files, self._store = files, files.store
        self._failure: Exception | None = None
        files.begin()

    def moves(self, bucket: Bucket) -> bool:
        return _rests(bucket)

    def _depart(self, bucket: Bucket, grad: torch.Tensor, further: bool) -> torch.Tensor:
        self._make_room(bucket, further)
        with self._keeping_errors():
            target = self._store.lend(bucket.name)
            try:
                before = self._store.fetch(bucket.name) if further else None
            except BaseException:
                self._store.release(target)
                raise
            self._files.held.append((target, before))
            self._fly(bucket, grad, target, further)
        return torch.empty(bucket.owned, dtype=grad.dtype, device="meta")  # stands for what `complete` reads

    def _arrive(self) -> Bucket:
        bucket = super()._arrive()
        lent, before = self._files.held.popleft()
        with self._keeping_errors():
            self._store.write(bucket.name, lent if before is None else self._added(bucket, lent, before))
        return bucket

    def _added(self, bucket: Bucket, lent: torch.Tensor, before: PendingRead) -> torch.Tensor:
        """The sum of a summand, whose memory is given back, and what was there before it."""
        try:
            total = before.result().add_(lent)
            squares = self._squares_of(bucket, total).item()
        except BaseException:
            before.cancel()
            raise
        finally:
            self._store.release(lent)
        self._squares[bucket.name] = torch.full_like(self._squares[bucket.name], squares)
        return total

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def complete(self, grads: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return _Read(self._store, super().complete(grads), self._plan)

    def settle(self) -> None:
        """Return once all gradients are in the files, on all ranks. Collective.

        Raises:
            StorageError: some could not be written, or read to be added to.
            RankFailure: those of another rank.
        """

        def work() -> None:
            while self._flights.first:
                self._arrive()
            if self._failure is not None:
                raise self._failure
            self._store.flush()

        self._together(work, "written to disk")

    def examined(self, examine: Callable[[], _T]) -> _T:
        """As of `Landing`, where a read may fail.

        Raises:
            StorageError: a gradient could not be read.
            RankFailure: one of another rank.
        """
        found: list[_T] = []
        self._together(lambda: found.append(examine()), "read from disk")
        return found[0]

    def _together(self, work: Callable[[], None], doing: str) -> None:
        """Do work before the step's update, on all ranks or on none."""
        failure, problems, _ = attempted(self._mesh, work)
        if problems:
            error = error_of(failure, problems, f"the step's gradients could not be {doing}")
            error.add_note("The state that the step was given is as it was: it can be saved, and used again")
            raise error

    def arriving(
        self, grads: Mapping[str, torch.Tensor], groups: Sequence[Sequence[Bucket]]
    ) -> Generator[Mapping[str, torch.Tensor]]:
        names = [[bucket.name for bucket in group if _rests(bucket)] for group in groups]
        with contextlib.closing(self._store.fetched(names)) as fetched:
            for group, lent in zip(groups, fetched, strict=True):
                try:
                    yield lent | {bucket.name: grads[bucket.name] for bucket in group if bucket.name not in lent}
                finally:
                    for gradient in lent.values():
                        self._store.release(gradient)


class _Read(Mapping[str, torch.Tensor]):
    """Bucket name -> gradient, of which each access to one on disk reads a copy."""

    def __init__(self, store: Store, grads: Mapping[str, torch.Tensor], plan: Plan) -> None:
        self._store, self._grads, self._buckets = store, grads, plan.bucket_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if not _rests(self._buckets[name]):
            return self._grads[name]
        lent = self._store.fetch(name).result()
        try:
            return lent.clone()
        finally:
            self._store.release(lent)

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


def gradients_rest(plan: Plan) -> bool:
    """Whether gradients of a rank lie on disk from backward to the update."""
    return any(map(_rests, plan.everywhere.trained))


def _rests(bucket: Bucket) -> bool:
    return MEMORIES[bucket.memory.grad].rests

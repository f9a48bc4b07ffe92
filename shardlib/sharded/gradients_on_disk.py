"""Gradients in files: written behind while backward goes on, and read ahead by the update.

They are a step's scratch: there is one slot for each, nothing is committed, and the next step writes over them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.memory import resting_gradients
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, PendingRead, Store, TieredBuffers
from shardlib.sharded.gradient_offload import GradientOffload, InFlight, gradient_rests

_T = TypeVar("_T")


class GradientsOnDisk(TieredBuffers):
    """The files of one rank's gradients. Never are all gradients in host memory.

    Attributes:
        in_flight: gradients that are on their way from the device, in order.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        flats = {
            bucket.name: Flat(bucket.owned, bucket.reduce_dtype) for bucket in plan.trained if gradient_rests(bucket)
        }
        super().__init__(plan, mesh, "grad", flats, resting_gradients(plan), slots=1)
        self.in_flight: deque[InFlight] = deque()

    def begin(self) -> None:
        """Forget the gradients of the step before, also of one that failed on its way."""
        if self.in_flight and self.mesh.transfers.apart:
            torch.accelerator.synchronize()  # copies may still write there
        while self.in_flight:
            first = self.in_flight.popleft()
            if first.lent is not None:
                self.store.release(first.lent)
            if first.before is not None:
                first.before.cancel()
        self.roll_back()

    def give_back(self) -> None:
        self.begin()
        super().give_back()


class DiskGradientOffload(GradientOffload):
    """The offload of one step's gradients to files. Squares are summed as they arrive, so that the norm needs no read.

    A sum over micro-batches is read, added to and written again. What fails is raised by `settle`, on all ranks: others would
    wait in the exchanges of backward for a rank that raises there.
    """

    def __init__(self, plan: Plan, mesh: Mesh, unreduced: tuple[str, ...], files: GradientsOnDisk) -> None:
        super().__init__(plan, mesh, unreduced)
        self._store, self._in_flight = files.store, files.in_flight
        self._failure: Exception | None = None
        files.begin()

    def moves(self, bucket: Bucket) -> bool:
        return gradient_rests(bucket)

    def _copy_to(self, bucket: Bucket, grad: torch.Tensor, further: bool) -> torch.Tensor:
        self._make_room(bucket, further)
        with self._keeping_errors():
            lent, before = self._store.lend(bucket.name), None
            try:
                before = self._store.fetch(bucket.name) if further else None
                transfer = self._copy(grad, lent)
            except BaseException:
                self._store.release(lent)
                if before is not None:
                    before.cancel()
                raise
            self._in_flight.append(InFlight(bucket, transfer, grad.numel(), further, lent, before))
        return torch.empty(bucket.owned, dtype=grad.dtype, device="meta")  # stands for what `complete` reads

    def _arrive(self) -> None:
        bucket, transfer, _, _, lent, before = self._in_flight.popleft()
        assert lent is not None
        with self._keeping_errors():
            transfer.wait()
            self._store.write(bucket.name, lent if before is None else self._added(bucket, lent, before))

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
        return _Copies(self._store, super().complete(grads), self._plan)

    def settle(self) -> None:
        """Return once all gradients are in the files, on all ranks. Collective.

        Raises:
            StorageError: some could not be written, or read to be added to.
            RankFailure: those of another rank.
        """

        def work() -> None:
            while self._in_flight:
                self._arrive()
            if self._failure is not None:
                raise self._failure
            self._store.flush()

        self._together(work, "written to disk")

    def examined(self, examine: Callable[[], _T]) -> _T:
        return self._together(examine, "read from disk")

    def _together(self, work: Callable[[], _T], doing: str) -> _T:
        """Do work before the step's update, on all ranks or on none."""
        result: list[_T] = []
        failure, problems, _ = attempted(self._mesh, lambda: result.append(work()))
        if problems:
            error = error_of(failure, problems, f"the step's gradients could not be {doing}")
            error.add_note("The state that the step was given is as it was: it can be saved, and used again")
            raise error
        return result[0]

    def arriving(
        self, grads: Mapping[str, torch.Tensor], groups: Sequence[Sequence[Bucket]]
    ) -> Generator[Mapping[str, torch.Tensor]]:
        names = [[bucket.name for bucket in group if gradient_rests(bucket)] for group in groups]
        with contextlib.closing(self._store.fetched(names)) as fetched:
            for group, lent in zip(groups, fetched, strict=True):
                try:
                    yield lent | {bucket.name: grads[bucket.name] for bucket in group if bucket.name not in lent}
                finally:
                    for gradient in lent.values():
                        self._store.release(gradient)


class _Copies(Mapping[str, torch.Tensor]):
    """Bucket name -> gradient, of which each access to one on disk reads a copy."""

    def __init__(self, store: Store, grads: Mapping[str, torch.Tensor], plan: Plan) -> None:
        self._store, self._grads, self._buckets = store, grads, plan.bucket_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if not gradient_rests(self._buckets[name]):
            return self._grads[name]
        with self._store.reading(name) as lent:
            return lent.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


def gradients_rest(plan: Plan) -> bool:
    """Whether gradients of a rank lie on disk from backward to the update."""
    return any(map(gradient_rests, plan.everywhere.trained))

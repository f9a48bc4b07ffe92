"""Gradient offload: a step's gradients go to the memory in which the optimizer works, or to files.

A bucket's gradient goes there as soon as its sum over micro-batches and ranks is complete, while backward goes on, and its
device memory is freed: at most two units' gradients are on their way. The squares for the norm are summed before, on the
device. Where gradients are accumulated in the other memory, that of each micro-batch goes there, and is added once it is
there; the squares are then summed there too. The gradient of a bucket that the optimizer updates on the device stays where it
is.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.collectives.summation import sum_of_squares
from shardlib.common.disk import BLOCK, whole_blocks
from shardlib.mesh.memories import MEMORIES, Transfer
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.memory import resting_gradients
from shardlib.plan.plan import Plan
from shardlib.sharded.counting import Counting
from shardlib.sharded.disk import Flat, PendingRead, Store, TieredBuffers

_T = TypeVar("_T")
_ADDENDS = 2  # summands of a gradient that are on their way to the first


class InFlight(NamedTuple):
    """A gradient, or a ``further`` summand of one, that is on its way from the device.

    Attributes:
        lent, before: of one that goes to a file, the store's memory that it comes to, and the read of the sum so far.
    """

    bucket: Bucket
    transfer: Transfer
    numel: int
    further: bool
    lent: torch.Tensor | None = None
    before: PendingRead | None = None


class Follower(Protocol):
    """What is told of a step's gradients in the optimizer's memory, while others are computed."""

    def begin(self) -> None:
        """Forget what came before: the step's gradients are computed (again)."""
        ...

    def landed(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> None:
        """A bucket's gradient is complete once ``transfer`` is."""
        ...

    def changes(self, bucket: Bucket) -> None:
        """A gradient that was complete gets a further summand, now."""
        ...


class GradientOffload:
    """The offload of one step's gradients.

    Args:
        unreduced: axes over which gradients are left unsummed.
        kept: bucket name -> a buffer in the optimizer's memory, for steps to reuse; buffers that are missing are added.
        follower: what is told of each gradient that the optimizer works on in host memory.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        unreduced: tuple[str, ...],
        kept: dict[str, torch.Tensor] | None = None,
        follower: Follower | None = None,
    ) -> None:
        self._plan, self._mesh, self._kept = plan, mesh, {} if kept is None else kept
        self._follower = follower
        if follower is not None:
            follower.begin()
        self._counting = Counting(plan, mesh, unreduced)
        self._transfers: dict[str, Transfer] = {}
        self._squares: dict[str, torch.Tensor] = {}
        self._in_flight: deque[InFlight] = deque()  # in the order in which they left and arrive
        self._here: dict[str, torch.Tensor] = {}  # gradients that the follower has where they came to be
        self._addends: dict[str, torch.Tensor] = {}  # of buckets whose next summand is on its way
        self._summed: set[str] = set()  # buckets of several summands

    def moves(self, bucket: Bucket) -> bool:
        """Whether the optimizer works on the bucket in another memory than the gradient comes in."""
        return self._mesh.transfers.apart and bucket.memory.optimizer != "device"

    def takes(self, bucket: Bucket) -> bool:
        """Whether a gradient is taken as soon as it is complete, not with all others after backward."""
        return self.moves(bucket) or (self._follower is not None and bucket.memory.optimizer != "device")

    def take(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        """Take a gradient, complete or of one micro-batch; returns it in the optimizer's memory, where it is complete, with
        what was taken of the bucket before, after `wait`."""
        further = bucket.name in self._squares
        if further and self._follower is not None:
            self._follower.changes(bucket)
        if not self.moves(bucket):
            if further:
                grad = self._here[bucket.name].add_(grad)
            self._squares[bucket.name] = self._squares_of(bucket, grad)
            if self.takes(bucket) and not further:
                self._here[bucket.name] = grad
                self._follow(bucket, grad, Transfer())
            return grad
        if not further:
            self._squares[bucket.name] = self._squares_of(bucket, grad)
        target = self._copy_to(bucket, grad, further)
        # A gradient holds memory of the device until it has arrived. What must arrive before the next may leave depends on
        # the plan alone, not on how quick a disk is, so that the plan can say what is held.
        while self._in_flight and (
            sum(each.numel for each in self._in_flight) > self._plan.most_in_flight or self._in_flight[0].transfer.done
        ):
            self._arrive()
        return target

    def _copy_to(self, bucket: Bucket, grad: torch.Tensor, further: bool) -> torch.Tensor:
        """Send a gradient on its way, or a ``further`` summand of one; returns what it comes to."""
        target = memory = self._buffer(bucket.name, bucket, grad.dtype)
        if further:
            self.wait(bucket.name)
            memory = self._addends[bucket.name] = self._spare(bucket, grad.dtype)
        self._transfers[bucket.name] = transfer = self._copy(grad, memory)
        self._in_flight.append(InFlight(bucket, transfer, grad.numel(), further))
        if not further:
            self._follow(bucket, target, transfer)
        return target

    def _arrive(self) -> None:
        """Wait for the first of those that are on their way."""
        self._in_flight.popleft().transfer.wait()

    @cached_property
    def _window(self) -> int:
        """Bytes of host memory that gradients pass through on their way to files."""
        return resting_gradients(self._plan)

    def _make_room(self, bucket: Bucket, further: bool) -> None:
        """Wait until a gradient may leave for a file: for a summand of the same sum that is on its way, and for those that
        hold the memory that it passes through, of which there is a limit."""
        while self._in_flight:
            held = sum(_staged(each.bucket, each.further) for each in self._in_flight)
            same = further and any(each.bucket is bucket for each in self._in_flight)
            if not same and held + _staged(bucket, further) <= self._window:
                return
            self._arrive()

    def _squares_of(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        return self._counting.summand(sum_of_squares, bucket, grad)

    def _copy(self, grad: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._mesh.transfers.copy(grad, target)

    def _follow(self, bucket: Bucket, grad: torch.Tensor, transfer: Transfer) -> None:
        if self._follower is not None:
            self._follower.landed(bucket, grad, transfer)

    def _buffer(self, name: str, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self._mesh.zeros(bucket.owned, dtype, bucket.memory.optimizer)
        return self._kept[name]

    @property
    def spare(self) -> int:
        """Bytes of the memory for summands on their way."""
        return sum(held.nbytes for name, held in self._kept.items() if name not in self._plan.bucket_of)

    def _spare(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a summand on its way, which buckets of one size share."""
        while len(self._addends) >= _ADDENDS:
            self.wait(next(iter(self._addends)))
        taken = {id(addend) for addend in self._addends.values()}
        names = (f"summand {number} of {bucket.owned} {dtype}" for number in range(_ADDENDS))
        return next(spare for name in names if id(spare := self._buffer(name, bucket, dtype)) not in taken)

    def complete(self, grads: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Bucket name -> gradient in the optimizer's memory, from the sums of all buckets, of which some have been taken."""
        return {
            name: grad if name in self._squares else self.take(self._plan.bucket_of[name], grad)
            for name, grad in grads.items()
        }

    def settle(self) -> None:
        """Return once what was taken is safe, on all ranks. Collective."""

    def examined(self, examine: Callable[[], _T]) -> _T:
        """What ``examine`` finds, which reads gradients of this rank and is no collective itself. Collective.

        Raises:
            StorageError: a gradient on disk could not be read.
            RankFailure: one of another rank.
        """
        self.wait_for_all()
        return examine()

    def squares(self) -> torch.Tensor:
        """This rank's summand of the sum of squares of all gradients, as the plan's `Summation` holds it."""
        for name in list(self._addends):
            self.wait(name)
        for name in self._summed:
            squares = self._counting.summand(sum_of_squares, self._plan.bucket_of[name], self._kept[name])
            self._squares[name] = torch.full_like(self._squares[name], squares.item())
        return self._counting.total([self._squares[bucket.name] for bucket in self._plan.trained])

    @property
    def suspects(self) -> list[Bucket]:
        """Buckets whose squares, where this rank counts them, do not sum to a finite number; for after `squares`.

        A gradient that is not finite is in a suspect of one of the ranks, as a rank counts each element.
        """
        value = self._plan.reductions.summation.values
        return [bucket for bucket in self._plan.trained if not value(self._squares[bucket.name]).isfinite()]

    def wait(self, name: str) -> None:
        """Return once the gradient of a bucket has arrived."""
        if name in self._transfers:
            self._transfers.pop(name).wait()
        if name in self._addends:
            self._kept[name].add_(self._addends.pop(name))
            self._summed.add(name)

    def wait_for_all(self) -> None:
        """Return once every gradient has arrived."""
        for name in list(self._transfers):
            self.wait(name)

    def arriving(
        self, grads: Mapping[str, torch.Tensor], groups: Sequence[Sequence[Bucket]]
    ) -> Generator[Mapping[str, torch.Tensor]]:
        """Gradients among which are those of each group of buckets in turn, which have arrived. They may be gone when the
        next are asked for."""
        for group in groups:
            for bucket in group:
                self.wait(bucket.name)
            yield grads


def _staged(bucket: Bucket, further: bool) -> int:
    """Bytes of host memory that a gradient passes through on its way to a file: its own, and those of the sum so far."""
    if not _rests(bucket):
        return 0
    return (1 + further) * max(BLOCK, whole_blocks(bucket.owned * bucket.reduce_dtype.itemsize))


def _rests(bucket: Bucket) -> bool:
    return MEMORIES[bucket.memory.grad].rests


class FakeGradientOffload(GradientOffload):
    """Offload for planning: tensors have no values, and the other memory is that of the meta device."""

    def moves(self, bucket: Bucket) -> bool:
        return bucket.memory.optimizer != "device"

    def _copy_to(self, bucket: Bucket, grad: torch.Tensor, further: bool) -> torch.Tensor:
        if not _rests(bucket):
            return super()._copy_to(bucket, grad, further)
        self._make_room(bucket, further)
        target = self._buffer(bucket.name, bucket, grad.dtype)
        self._in_flight.append(InFlight(bucket, self._copy(grad, target), grad.numel(), further))
        return target

    def _squares_of(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="meta")

    def _copy(self, grad: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._mesh.transfers.start("down", lambda: None, grad)

    def _buffer(self, name: str, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        return self._kept.setdefault(name, torch.empty(bucket.owned, dtype=dtype, device="meta"))


# Gradients in files: written behind while backward goes on, and read ahead by the update. They are a step's scratch: there is
# one slot for each, nothing is committed, and the next step writes over them.


class GradientsOnDisk(TieredBuffers):
    """The files of one rank's gradients. Never are all gradients in host memory.

    Attributes:
        in_flight: gradients that are on their way from the device, in order.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        flats = {bucket.name: Flat(bucket.owned, bucket.reduce_dtype) for bucket in plan.trained if _rests(bucket)}
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
        return _rests(bucket)

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
        names = [[bucket.name for bucket in group if _rests(bucket)] for group in groups]
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
        if not _rests(self._buckets[name]):
            return self._grads[name]
        with self._store.reading(name) as lent:
            return lent.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


def gradients_rest(plan: Plan) -> bool:
    """Whether gradients of a rank lie on disk from backward to the update."""
    return any(map(_rests, plan.everywhere.trained))

"""Gradient offload: a step's gradients go to the memory in which the optimizer works.

A bucket's gradient goes there as soon as its sum over micro-batches and ranks is complete, while backward goes on, and its
device memory is freed: at most two units' gradients are on their way. The squares for the norm are summed before, on the
device. Where gradients are accumulated in the other memory, that of each micro-batch goes there, and is added once it is
there; the squares are then summed there too. The gradient of a bucket that the optimizer updates on the device stays where it
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.common.disk import BLOCK, whole_blocks
from shardlib.mesh.memories import MEMORIES, Transfer
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.memory import resting_gradients
from shardlib.plan.plan import Plan
from shardlib.sharded.counting import Counting
from shardlib.sharded.disk import PendingRead

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
    if not gradient_rests(bucket):
        return 0
    return (1 + further) * max(BLOCK, whole_blocks(bucket.owned * bucket.reduce_dtype.itemsize))


def gradient_rests(bucket: Bucket) -> bool:
    """Whether a bucket's gradient lies on disk from backward to the update."""
    return MEMORIES[bucket.memory.grad].rests


class FakeGradientOffload(GradientOffload):
    """Offload for planning: tensors have no values, and the other memory is that of the meta device."""

    def moves(self, bucket: Bucket) -> bool:
        return bucket.memory.optimizer != "device"

    def _copy_to(self, bucket: Bucket, grad: torch.Tensor, further: bool) -> torch.Tensor:
        if not gradient_rests(bucket):
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

"""Parameters in files: read ahead for each use, and written behind after an update.

A rank's files are shared by the `Sharded` trees of a run, one after the other: a step writes the next values beside the last
ones, and a commit makes them the values. Never are all parameters in memory; reads and writes pass through a bounded pool,
from which units that are announced are read before they are asked for. A tile of a leaf is read on its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardlib.collectives import primitives
from shardlib.collectives.attempts import attempted, error_of
from shardlib.errors import StorageError
from shardlib.mesh.memories import MEMORIES, Transfer, window
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange
from shardlib.plan.memory import resting_sizes
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, PendingRead, TieredBuffers
from shardlib.sharded.gather import Gather


class ParamsOnDisk(TieredBuffers):
    """The files of one rank's parameters, and the host memory that they pass through.

    Attributes:
        given: the last number that was given to a tree; trees of skipped and failed steps have theirs too.
        unread: the first error of a `gather`; see `Reads`.
    """

    given: int
    writes: int

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        flats = {
            part.name: Flat(part.size(part.param_level), part.dtype) for bucket in plan.buckets for part in bucket.cut
        }
        super().__init__(plan, mesh, "param", flats, window(list(resting_sizes(plan).values())))
        self._buckets = plan.bucket_of
        self.given = 0
        self.unread: Exception | None = None
        self._begun: dict[str, PendingRead] = {}  # announced and not asked for yet
        self._leaving: deque[tuple[torch.Tensor, Transfer]] = deque()  # on their way to the device

    def tree(self) -> BuffersOnDisk:
        """The buffers of a further tree, which a commit makes the files' content."""
        self.given += 1
        return BuffersOnDisk(self, self.given)

    def get(self, name: str) -> torch.Tensor:
        bucket = self._buckets[name]
        values = torch.empty(
            bucket.size(bucket.param_level), dtype=bucket.dtype, device=self.mesh.device_for(bucket.memory.param)
        )
        for part, view in zip(bucket.cut, bucket.of_tiles(values), strict=True):
            lent = self._fetch(part.name).result()
            try:
                view.copy_(lent)
            finally:
                self.store.release(lent)
        return values

    def put(self, name: str, values: torch.Tensor) -> None:
        bucket = self._buckets[name]
        self.writes += 1
        for part, view in zip(bucket.cut, bucket.of_tiles(values), strict=True):
            if part.name in self._begun:
                self._begun.pop(part.name).cancel()
            self._make_room(part.name)
            self.store.write(part.name, view)

    def announce(self, name: str) -> None:
        """Begin to read the buffer of a bucket or a tile that will be asked for, if there is memory for it."""
        self._collect()
        with contextlib.suppress(StorageError, MemoryError):  # its use tries again, and says what fails
            if name not in self._begun and self.store.room(name):
                self._begun[name] = self.store.fetch(name)

    def gather(self, bucket: Bucket, route: Sequence[Exchange]) -> Gather:
        """Read the buffer of a bucket or a tile, and start to bring it to the device and to gather it.

        Where it cannot be read, and other ranks would wait for it, zeros are gathered, and the error is kept.
        """
        apart = self.mesh.transfers.apart
        try:
            lent = self._fetch(bucket.name).result()
        except Exception as error:
            if self.mesh.alone:
                raise
            self.unread = self.unread or error
            zeros = torch.zeros(bucket.size(bucket.param_level), dtype=bucket.dtype, device=self.mesh.device)
            return Gather(self.mesh, route, zeros, comes=apart)  # no sooner than where they come from the host
        if not apart:
            try:
                values = lent.clone()  # what the loss function is given must not change when other buffers are read
            finally:
                self.store.release(lent)
            return Gather(self.mesh, route, values)
        try:
            gather = Gather(self.mesh, route, lent)
        except BaseException:  # such as a device without memory
            self.store.release(lent)
            raise
        if gather.transfer is not None:
            self._leaving.append((lent, gather.transfer))
        return gather

    def roll_back(self) -> None:
        self._cancel()
        super().roll_back()

    def give_back(self) -> None:
        self._cancel()
        self._collect()
        super().give_back()

    def _cancel(self) -> None:
        """Give back the memory of reads that nobody has asked for."""
        while self._begun:
            self._begun.popitem()[1].cancel()

    def _fetch(self, name: str) -> PendingRead:
        self._collect()
        if name in self._begun:
            return self._begun.pop(name)
        self._make_room(name)
        return self.store.fetch(name)

    def _collect(self) -> None:
        """Give back the memory of buffers that have come to the device."""
        while self._leaving and self._leaving[0][1].done:
            self.store.release(self._leaving.popleft()[0])

    def _make_room(self, name: str) -> None:
        """Give back memory until a buffer fits, or until what is missing is being written and comes back by itself."""
        while not self.store.room(name) and (self._leaving or self._begun):
            if self._leaving:
                lent, transfer = self._leaving.popleft()
                transfer.wait()
                self.store.release(lent)
            else:
                self._begun.popitem()[1].cancel()  # the one that is needed last


class BufferOnDisk:
    """The buffer of a bucket or a tile, which is read for each use."""

    dtype: torch.dtype

    def __init__(self, files: ParamsOnDisk, bucket: Bucket) -> None:
        self._files, self._bucket, self.dtype = files, bucket, bucket.dtype

    def announce(self) -> None:
        self._files.announce(self._bucket.name)

    def gather(self, route: Sequence[Exchange]) -> Gather:
        return self._files.gather(self._bucket, route)


class BuffersOnDisk(Mapping[str, torch.Tensor]):
    """Bucket name -> this rank's flat buffer, of which each access reads a copy. What a `Sharded` tree holds in files.

    Args:
        files: shared with the trees before this one and after it.
        version: the number of the commit that makes these buffers the files' content.
    """

    version: int

    def __init__(self, files: ParamsOnDisk, version: int) -> None:
        self._files, self.version = files, version

    @property
    def files(self) -> ParamsOnDisk:
        """The files, for reading and writing.

        Raises:
            DonatedStateError: a later step has written over these values.
        """
        self._files.require(self.version, "these parameters")
        return self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.files.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files._buckets  # without a read

    def __iter__(self) -> Iterator[str]:
        return iter(self._files._buckets)

    def __len__(self) -> int:
        return len(self._files._buckets)


class Filling:
    """Files that are filled with parameters, bucket by bucket. What they held before becomes invalid, if none fails."""

    def __init__(self, files: ParamsOnDisk) -> None:
        self._files = files
        self._begun = False
        self._failure: Exception | None = None

    def put(self, name: str, values: torch.Tensor) -> None:
        """Write a bucket's buffer. An error is raised by `finish`, on all ranks."""
        if self._failure is None:
            try:
                if not self._begun:
                    self._files.settle()  # what a checkpoint or an import has written stays, whatever fails
                self._begun = True
                self._files.put(name, values)
            except Exception as error:
                self._failure = error

    def finish(self) -> BuffersOnDisk:
        """The buffers, in the files. Collective.

        Raises:
            StorageError: they could not be written; the files of all ranks hold what they held before.
            RankFailure: those of another rank could not; likewise.
        """

        def complete() -> None:
            if self._failure is not None:
                raise self._failure
            self._files.flush()

        failure, problems, _ = attempted(self._files.mesh, complete)
        if problems:
            if self._begun:
                self._files.roll_back()
            raise error_of(failure, problems, "the parameters could not be written to disk")
        filled = self._files.tree()
        self._files.coming = filled.version
        self._files.commit()
        return filled


class Reads:
    """The reads of one run of a function, which fail on all ranks or on none.

    A rank that cannot read a unit goes on with zeros in its place, so that it takes part in all that other ranks wait for. At
    the end the ranks tell each other, in an exchange that they make anyway where there is one, and all of them raise: what
    the function finds then is meaningless.
    """

    def __init__(self, mesh: Mesh, buffers: BuffersOnDisk | None) -> None:
        self._mesh, self._files = mesh, None if buffers is None else buffers.files
        if self._files is not None:
            self._files.unread = None

    @property
    def failed(self) -> bool:
        """Whether this rank could not read a unit."""
        return self._files is not None and self._files.unread is not None

    def require(self, axes: Sequence[str]) -> None:
        """Raise the errors of any rank on all ranks along ``axes``. Collective over these, if parameters are on disk."""
        if self._files is None or self._mesh.alone:
            return
        failed = torch.tensor([float(self.failed)], device=self._mesh.device)
        primitives.sum_over(self._mesh, tuple(axes), failed)
        if failed.item():
            self.explain(axes)

    def explain(self, axes: Sequence[str]) -> None:
        """As `require`, where the ranks know that one of them differs from the others.

        Raises:
            StorageError: where a unit could not be read; names the file and the remedy.
            RankFailure: elsewhere; names the ranks, with their errors.
        """
        if self._files is None:
            return
        failure, self._files.unread = self._files.unread, None
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        everyone = primitives.all_gather_object(self._mesh, axes, (self._mesh.rank, text))
        problems = [(rank, problem) for rank, problem in everyone if problem]
        if problems:
            error = error_of(failure, problems, "parameters on disk could not be read")
            error.add_note(
                "Nothing was updated: the parameters and the state that were given can be saved, and used again"
            )
            raise error


def params_rest(plan: Plan) -> bool:
    """Whether the parameters are on disk between their uses."""
    return any(MEMORIES[bucket.memory.param].rests for bucket in plan.everywhere.buckets)

"""Parameters in files: read ahead for each use, and written behind after an update.

A rank's files are shared by the `Sharded` trees of a run, one after the other: a step writes the next values beside the last
ones, and a commit makes them the values. Never are all parameters in memory; reads and writes pass through a bounded pool,
from which units that are announced are read before they are asked for. A tile of a leaf is read on its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.errors import DonatedStateError, StorageError
from shardlib.mesh.memories import MEMORIES, Transfer, window
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Exchange
from shardlib.plan.memory import resting_sizes
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, PendingRead, close_with, open_for_run
from shardlib.sharded.gather import Gather

FOLDER = "parameters"  # beside the files of the optimizer's states


class ParamsOnDisk:
    """The files of one rank's parameters, and the host memory that they pass through.

    Attributes:
        mesh: the mesh of the rank.
        store: the files.
        writes: how many there have been, without those that were taken back.
        version: the number of the trees that the values belong to; those of earlier ones are written over.
        given: the last number that was given to a tree; trees of skipped and failed steps have theirs too.
        unread: the first error of a `gather`; see `shardlib.sharded.tree`.

    Raises:
        StorageError: the folders are in use, hold other parameters, cannot be written to, or have too little space.
        RankFailure: those of another rank.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        assert plan.claims is not None  # they say that the parameters are on disk
        self.mesh, self._buckets = mesh, plan.bucket_of
        self.version = self.given = self.writes = self._committed = 0
        self.unread: Exception | None = None
        self._begun: dict[str, PendingRead] = {}  # announced and not asked for yet
        self._leaving: deque[tuple[torch.Tensor, Transfer]] = deque()  # on their way to the device
        folders = [Path(folder) / FOLDER for folder in plan.claims.location("param").folders]
        flats = {
            part.name: Flat(part.size(part.param_level), part.dtype) for bucket in plan.buckets for part in bucket.cut
        }
        problem = "the files for parameters on disk could not be opened"
        self.store = open_for_run(mesh, folders, flats, window(list(resting_sizes(plan).values())), problem)
        close_with(self, self.store)
        mesh.kept.add(self)

    def tree(self) -> BuffersOnDisk:
        """The buffers of a further tree, which a commit makes the files' content."""
        self.given += 1
        return BuffersOnDisk(self, self.given)

    def part(self, bucket: Bucket) -> BufferOnDisk:
        """The buffer of a bucket, or of one of its tiles, for use."""
        return BufferOnDisk(self, bucket)

    def read(self, name: str) -> torch.Tensor:
        """A copy of a bucket's buffer, in plain host memory."""
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

    def write(self, name: str, values: torch.Tensor) -> None:
        """Begin to write a bucket's buffer. The values, in any memory, are copied before this returns."""
        bucket = self._buckets[name]
        self.writes += 1
        for part, view in zip(bucket.cut, bucket.of_tiles(values), strict=True):
            if part.name in self._begun:
                self._begun.pop(part.name).cancel()
            self._make_room(part.name)
            self.store.write(part.name, view)

    def announce(self, name: str) -> None:
        """Begin to read a buffer that will be asked for, if there is memory for it."""
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

    def commit(self) -> None:
        """Make what was written the values that `roll_back` goes back to."""
        self.store.commit(self.version)
        self._committed = self.writes

    def roll_back(self) -> None:
        """Take back what was written since the last commit."""
        while self._begun:
            self._begun.popitem()[1].cancel()
        self.store.roll_back()
        self.writes = self._committed

    def give_back(self) -> None:
        """Free the memory that values pass through; the next use makes it anew."""
        while self._begun:
            self._begun.popitem()[1].cancel()
        self._collect()
        self.store.give_back()

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

    def __init__(self, files: ParamsOnDisk, version: int) -> None:
        self._files, self._version = files, version

    @property
    def files(self) -> ParamsOnDisk:
        """The files, for reading and writing.

        Raises:
            DonatedStateError: a later step has written over these values.
        """
        if self._version < self._files.version:
            raise DonatedStateError(
                "these parameters lay on disk, and a later step has written its own there: use those of the state that the "
                "step returned, or copy what is to be kept before it (sl.unshard)"
            )
        return self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.files.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files._buckets  # without a read

    def __iter__(self) -> Iterator[str]:
        return iter(self._files._buckets)

    def __len__(self) -> int:
        return len(self._files._buckets)

    def next(self) -> BuffersOnDisk:
        """The buffers that a step makes of these."""
        return self.files.tree()

    def settle(self) -> None:
        """Commit what was written since the last step, so that the next one can be taken back to it."""
        if self._files.store.changed:
            self._files.commit()

    def flush(self) -> None:
        """Wait for what is being written; raises an error if something could not be."""
        self._files.store.flush()

    def commit(self) -> None:
        """Make what was written these buffers' values."""
        self._files.version = self._version
        self._files.commit()

    def roll_back(self) -> None:
        """Take back what was written since the last commit."""
        self._files.roll_back()


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
                if not self._begun and self._files.store.changed:
                    self._files.commit()  # what a checkpoint or an import has written stays, whatever fails
                self._begun = True
                self._files.write(name, values)
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
            self._files.store.flush()

        failure, problems, _ = attempted(self._files.mesh, complete)
        if problems:
            if self._begun:
                self._files.roll_back()
            raise error_of(failure, problems, "the parameters could not be written to disk")
        filled = self._files.tree()
        filled.commit()
        return filled


def params_rest(plan: Plan) -> bool:
    """Whether the parameters are on disk between their uses."""
    return any(MEMORIES[bucket.memory.param].rests for bucket in plan.everywhere.buckets)

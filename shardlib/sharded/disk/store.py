"""Buffers on disk: fetched ahead, written behind, and committed as one step."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardlib.common.disk import BLOCK, begin_writing
from shardlib.common.thresholds import Threshold
from shardlib.errors import StorageError
from shardlib.mesh.memories import AHEAD
from shardlib.sharded.disk import pool
from shardlib.sharded.disk.files import NOTES, ZEROS, Extent, FileLayout, Files, Flat, StepRecord
from shardlib.sharded.disk.pool import PendingRead, Pool, Write

DEPTH = 8  # requests at once
THREADS = "shardlib-disk"  # begins the names of their threads
_REQUEST = Threshold(1 << 21)  # bytes of a request


class Store:
    """Named flat buffers of one rank on disk, of which a step is there wholly or not at all.

    Every buffer has two slots. The last commit's slots are only read; writes go to the others, and a commit makes those the
    step. So what was written since can be taken back (`roll_back`), whatever has failed. This costs twice the space and no
    further writes. Every read is compared with the checksum that was taken when it was written.

    A *durable* store is for another run to take up: a commit waits for the writes, syncs each file once, and then writes and
    syncs one record, and the first write after it syncs the header once, in which the step before is no longer named. A crash
    at any time leaves the last step that was committed. Without it a commit waits for the writes alone, and what was
    committed is this run's.

    A buffer that was never written holds zeros. Methods are for one thread at a time.

    With one slot, buffers are scratch: nothing is committed, and `roll_back` forgets all of it.

    Args:
        folders: where the files are, one in each; buffers are divided over all.
        buffers: name -> `Flat`.
        memory: bytes of host memory that buffers pass through, the largest at least.
        rank, ranks: this rank's number, and how many share the folders.
        pinned: whether an accelerator copies from and to fetched memory beside other work.
        durable: whether a crash leaves the last commit.
        slots: 2; or 1 for scratch, which is not durable.

    Attributes:
        step: the number of the last commit; None before the first.
        notes: what the last commit keeps beside the buffers.

    Raises:
        StorageError: the folders are in use, hold other buffers, cannot be written to, or have too little space.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        buffers: Mapping[str, Flat],
        memory: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        pinned: bool = False,
        durable: bool = True,
        slots: int = 2,
    ) -> None:
        largest = max((flat.padded for flat in buffers.values()), default=0)
        if memory < largest:
            raise StorageError(f"{memory:,} bytes of host memory do not hold the largest buffer, of {largest:,}")
        request = max(BLOCK, _REQUEST() // BLOCK * BLOCK)
        layout = FileLayout(rank, ranks, buffers, len(folders), request, durable, slots)
        self._files = Files(list(map(Path, folders)), layout)
        self._layout = self._files.layout
        self._pool = Pool(memory, pinned)
        self._threads = ThreadPoolExecutor(DEPTH, THREADS)
        self._busy: dict[str, list[Future[None]]] = {}  # requests of a buffer that may not be done
        self._changed: set[int] = set()  # files with writes since the last commit
        self._failure: Exception | None = None
        self._take_up(self._files.header.records[0])

    @property
    def step(self) -> int | None:
        return self._committed.step

    @property
    def notes(self) -> bytes:
        return self._committed.notes

    @property
    def steps(self) -> list[int]:
        """The steps that `return_to` may name, newest first: the last commit's, and the one's before until the first write.

        Ranks that died while they committed may stand one step apart; the newest that all of them have is whole on each.
        """
        return [record.step for record in self._records if record.step is not None]

    def notes_of(self, step: int) -> bytes:
        """What one of `steps` keeps beside the buffers."""
        return next(record.notes for record in self._records if record.step == step)

    @property
    def _records(self) -> list[StepRecord]:
        return self._files.header.records if self._layout.durable else [self._committed]

    def room(self, name: str) -> bool:
        """Whether a buffer can be fetched or lent now, without waiting for memory."""
        return self._pool.room([self._block_size(name)])

    def _block_size(self, name: str) -> int:
        return max(self._layout.buffers[name].padded, BLOCK)

    def fetch(self, name: str) -> PendingRead:
        """Begin to read a buffer into memory of the store.

        The memory is lent until it is given to `write` or `release`. Waits while what is written behind leaves no memory.
        """
        self._finish(name)
        self._raise_failure()
        flat, slot = self._layout.buffers[name], self._slots[name]
        block = self._pool.take(self._block_size(name))
        if slot == ZEROS:
            pending = [self._threads.submit(_clear, block)]
        else:
            pending = [
                self._threads.submit(self._read, name, slot, index, extent, block)
                for index, extent in enumerate(self._layout.extents[name])
            ]
        self._busy[name] = pending
        return PendingRead(self._pool, block, *flat, pending)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """A buffer, in memory that is lent within the context."""
        lent = self.fetch(name).result()
        try:
            yield lent
        finally:
            self.release(lent)

    def fetched(self, groups: Iterable[Sequence[str]], ahead: int = AHEAD) -> Generator[dict[str, torch.Tensor]]:
        """Groups of buffers one after the other, of which ``ahead`` more are being read where memory allows.

        The caller writes or releases a group before it asks for the next.
        """
        left, begun = deque(groups), deque[dict[str, PendingRead]]()
        try:
            while left or begun:
                while left and len(begun) <= ahead:
                    sizes = [self._block_size(name) for name in left[0]]
                    if begun and not self._pool.room(sizes):
                        break
                    begun.append({})
                    for name in left.popleft():
                        begun[-1][name] = self.fetch(name)
                tensors = {name: fetch.result() for name, fetch in begun[0].items()}
                begun.popleft()  # the caller's from now on
                yield tensors
        finally:
            for fetches in begun:
                for fetch in fetches.values():
                    fetch.cancel()

    def lend(self, name: str) -> torch.Tensor:
        """Memory of the store for a buffer, with no values yet, as `fetch` lends it."""
        flat = self._layout.buffers[name]
        if not flat.numel:  # an empty tensor has no address that it could be recognised by
            return torch.empty(0, dtype=flat.dtype)
        return self._pool.take(self._block_size(name))[: flat.bytes].view(flat.dtype)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Begin to write a buffer. Memory that the store lent goes back to it, whatever fails; other memory is copied first.

        Raises:
            StorageError: an earlier write has failed, or a file was changed from outside.
        """
        flat, block = self._layout.buffers[name], self._pool.lent(tensor)
        try:
            if (tensor.numel(), tensor.dtype) != flat:
                raise StorageError(f"{name} is a buffer of {flat}, and was given {Flat(tensor.numel(), tensor.dtype)}")
            if not flat.numel:
                return
            self._finish(name)
            self._raise_failure()
            self._files.check()
            if self._layout.durable and len(self._files.header.records) > 1:
                self._files.header.settle()  # the step before the last one has the slots that are written to
            if block is None:
                block = self._pool.take(self._block_size(name))
                block[: flat.bytes].view(flat.dtype).copy_(tensor.view(-1))
        except BaseException:
            if block is not None:
                self._pool.give(block)
            raise
        block[flat.bytes :].zero_()
        slot = 1 - self._committed.slots[name] if self._committed.slots[name] != ZEROS else 0
        self._slots[name], self._sums[name] = slot, np.zeros_like(self._sums[name])
        self._pool.send(block)
        extents = self._layout.extents[name]
        self._changed.update(extent.file for extent in extents)
        writing = Write(self._pool, block, len(extents))
        self._busy[name] = [
            self._threads.submit(self._write, name, slot, index, extent, writing)
            for index, extent in enumerate(extents)
        ]

    def release(self, tensor: torch.Tensor) -> None:
        """Give back memory of the store that was fetched and is not to be written."""
        block = self._pool.lent(tensor)
        if block is not None:
            self._pool.give(block)

    def flush(self) -> None:
        """Wait until all that was written is in the files, for this run to read; a commit can hardly fail then.

        Raises:
            StorageError: a write has failed, or a file was changed from outside.
        """
        self._finish()
        self._raise_failure()
        self._files.check()

    def commit(self, step: int, notes: bytes = b"") -> None:
        """Make all that was written the step. In a durable store it is on the disk when this returns, and a crash leaves it.

        Raises:
            StorageError: a write has failed, or a file was changed from outside; the last commit stays.
        """
        if len(notes) > NOTES:
            raise StorageError(f"{len(notes):,} bytes of notes; {NOTES:,} is the most that a step may have")
        self.flush()
        made = StepRecord(self._committed.sequence + 1, step, notes, dict(self._slots), dict(self._sums))
        if self._layout.durable:
            try:
                for done in [self._threads.submit(self._files.sync, number) for number in sorted(self._changed)]:
                    done.result()
                self._files.header.write(made)
            except StorageError as error:
                self._failure = error
                raise
        self._take_up(made)

    def roll_back(self) -> None:
        """Take back what was written since the last commit, and errors with it."""
        self._finish()
        if self._failure is not None:
            if self._layout.durable:
                self._files.header.settle()
            self._failure = None
        self._take_up(self._committed)

    def return_to(self, step: int) -> None:
        """Go back to one of `steps`."""
        if step not in self.steps:
            raise StorageError(f"step {step} is not on disk; {self.steps} are")
        self._finish()
        if step != self.step:
            self._files.header.forget_newest()
        self._take_up(self._files.header.records[0])

    def close(self) -> None:
        """Wait for what was begun and close the files. What was not committed is lost."""
        self._finish()
        # Not waiting for idle threads to end: a collection may close a store within threading's own locks, which that takes.
        self._threads.shutdown(wait=False)
        self._files.close()

    def give_back(self) -> None:
        """Free the memory that buffers pass through, but for what is lent; what needs it again makes it anew."""
        self._finish()
        self._pool.give_back()

    def close_anywhere(self) -> None:
        """`close`, on whichever thread: one of the store's own cannot wait for itself."""
        if threading.current_thread().name.startswith(THREADS):
            threading.Thread(target=self.close).start()
        else:
            self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _take_up(self, record: StepRecord) -> None:
        self._committed, self._slots, self._sums = record, dict(record.slots), dict(record.sums)
        self._changed = set()

    def _finish(self, name: str | None = None) -> None:
        """Wait for the requests of a buffer, or of all."""
        for each in [*self._busy] if name is None else [name]:
            wait(self._busy.pop(each, []))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            whole = f"Step {self.step} is whole on disk" if self._layout.durable else "What was there before is whole"
            note = f"\n{whole}; what was written since is not" if self._layout.slots > 1 else ""
            raise StorageError(f"{self._failure}{note}") from self._failure

    def _place(self, slot: int, extent: Extent) -> tuple[int, int, Path]:
        """The descriptor, the offset and the path that a range of a slot lies at."""
        half = self._layout.halves[extent.file]
        return self._files.fds[extent.file], slot * half + extent.offset, self._files.paths[extent.file]

    def _read(self, name: str, slot: int, index: int, extent: Extent, block: torch.Tensor) -> None:
        fd, offset, path = self._place(slot, extent)
        view = _bytes(block, extent)
        pool.read(fd, view, offset, name, path)
        if zlib.crc32(view) != self._sums[name][index]:
            raise StorageError(
                f"{path} has other bytes of {name} at {offset:,} to {offset + extent.length:,} than were written. "
                "Restore a checkpoint on another disk"
            )

    def _write(self, name: str, slot: int, index: int, extent: Extent, writing: Write) -> None:
        try:
            fd, offset, path = self._place(slot, extent)
            view = _bytes(writing.block, extent)
            self._sums[name][index] = zlib.crc32(view)
            pool.write(fd, view, offset, name, path)
            if not self._files.direct[extent.file]:
                begin_writing(fd, offset, extent.length)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            writing.done()


def _bytes(block: torch.Tensor, extent: Extent) -> memoryview:
    """The memory of a range of a block."""
    array: Any = block.numpy()
    return memoryview(array)[extent.start : extent.start + extent.length]


def _clear(block: torch.Tensor) -> None:
    block.zero_()

"""The analysis of a dataset: a metric of each sample, made into an index file by several processes and after any kill.

Samples are cut into parts. A part is an index file of its own, in a folder beside the index, and has its name when it is
whole. What a killed run has finished is not done again, if it is of the same samples and function: a dataset with an
``identity`` says so, and samples of others are read again and compared by a checksum. At the end the parts, each sorted, are
merged in bounded memory.
"""

from __future__ import annotations

import bisect
import hashlib
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.common.disk import locked, make_folder, sync_folder
from shardlib.common.tensors import raw_bytes
from shardlib.data.files import Index, IndexFile, IndexFileError, refuse_unordered, write_index
from shardlib.data.metrics import Length, Metric, Rarity, added, counts_of, read, values_of
from shardlib.data.rows import as_dataset
from shardlib.errors import BatchError
from shardlib.mesh.launch.orphans import end_with
from shardlib.optim.checks import is_step

_PART = 1 << 20  # samples
_ROOM = 1 << 22  # samples
_NAMED = ("length", "rarity")

Make = Callable[[Any, int, int], np.ndarray]  # from a dataset and a range of its samples to numbers


def analyze(
    dataset: Any,
    metric: str | Callable[[Any], float],
    path: str | Path,
    *,
    processes: int = 1,
    part: int = _PART,
    progress: Callable[[str], None] = lambda finished: None,
) -> IndexFile:
    """Write a metric of each sample of a dataset to an index file, for `curriculum`, and return it.

    An analysis that was stopped or killed goes on with the parts that are not finished. They lie in the folder
    ``path.parts``, which is removed when the index is on the disk. A part is made again if the metric's own code or what it
    closes over has changed, or one of the samples: those of a dataset without an attribute ``identity`` (a text that says
    which it is, as `tokens` and `packed` have) are read again to know it. Remove the folder if what a metric calls was
    changed. Memory holds one part for each process, and four million samples while they are merged.

    Args:
        dataset: a map-style dataset, as `loader` takes it.
        metric: "length", the number of tokens; "rarity", the mean of −log p over a sample's tokens, where p is a token's
            share of all tokens of the dataset, which takes two passes; or a function from a sample to a number. Tokens are
            ``tokens`` or ``input_ids`` of a dictionary, without padding (by ``segments`` or ``attention_mask``), or the
            sample itself.
        processes: that read side by side. With more than one, dataset and function are sent to them.
        part: samples of a part.
        progress: called with a line of text after each part.

    Raises:
        BatchError: a dataset without samples, or a sample without a finite number. There is then no new index.
        IndexFileError: another process is writing this index.

    >>> windows = sl.data.tokens(sl.data.write_tokens("a.tokens", [b"aaaaaabcd"]).path, sequence=2)
    >>> index = sl.data.analyze(windows, "rarity", "a.rarity")
    >>> index.values.round(2).tolist(), index.samples.tolist()
    ([0.29, 0.29, 0.29, 2.08], [0, 1, 2, 3])
    """
    if metric not in _NAMED if isinstance(metric, str) else not callable(metric):
        raise BatchError(
            f"analyze: metric={metric!r}: use {' or '.join(map(repr, _NAMED))}, or a function from a sample to a number"
        )
    if not is_step(processes) or not is_step(part):
        raise BatchError(f"analyze: processes={processes!r}, part={part!r}: use integers, 1 or more of each")
    if not isinstance(path, (str, Path)):
        raise BatchError(f"analyze: path={path!r}: give the name of a file for the index")
    if processes > 1:
        _require_sendable(metric)
    dataset, path = as_dataset(dataset), Path(path)
    if not path.name or path.is_dir():
        raise BatchError(f"analyze: {path} is a folder: give the name of a file for the index")
    named = metric if hasattr(metric, "__qualname__") else type(metric)
    name = metric if isinstance(metric, str) else f"{named.__module__}:{named.__qualname__}"
    about = {"samples": len(dataset), "metric": name, "dataset": getattr(dataset, "identity", None)}
    with _folder(path) as folder:
        ends = [*range(part, len(dataset), part), len(dataset)]
        cuts = [(first, last) for first, last in zip([0, *ends], ends)]
        job = _Job(dataset, folder, about, cuts, processes, progress)
        values = [IndexFile(file) for file in job.files("values", _maker(metric, job))]
        whole = about | {"count": len(dataset)}
        write_index(path, whole, (np.asarray(each.values) for each in values), merged(values, _ROOM))
        shutil.rmtree(folder)
    sync_folder(path.parent)
    return IndexFile(path)


class _Job(NamedTuple):
    """What is analysed, and how: ``cuts`` are the ranges of samples of the parts."""

    dataset: Any
    folder: Path
    about: dict[str, Any]
    cuts: Sequence[tuple[int, int]]
    processes: int
    progress: Callable[[str], None]

    def files(self, name: str, make: Make) -> list[Path]:
        """The files of all parts of a pass over the samples, of which those that are not there yet are made."""
        about = self.about | {"pass": name, "make": _checksum(make)}
        parts = [
            _Part(self.folder / f"{name}-{first}", about | {"first": first, "last": last}) for first, last in self.cuts
        ]
        left = [part for part in parts if not (part.named and part.alike())]
        for done, made in enumerate(self._run(make, left), len(parts) - len(left) + 1):
            if made:
                self.progress(f"{name}: {done} of {len(parts)} parts")
        return [part.file for part in parts]

    def _run(self, make: Make, parts: Sequence[_Part]) -> Iterator[bool]:
        """For each part whether it was made."""
        if self.processes == 1:
            yield from (part.complete(self.dataset, make) for part in parts)
        elif parts:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(
                min(self.processes, len(parts)), spawn, _begin, (os.getpid(), self.dataset, make)
            ) as pool:
                try:
                    yield from pool.map(_complete, parts)
                finally:
                    pool.shutdown(cancel_futures=True)


class _Part(NamedTuple):
    """A part of a pass: its file, and what its header says."""

    file: Path
    about: dict[str, Any]

    @property
    def named(self) -> bool:
        """Whether the dataset says which it is."""
        return self.about["dataset"] is not None

    def alike(self) -> dict[str, Any] | None:
        """The header of the file that is there, if it is of the same function, and by their numbers of the same samples."""
        try:
            header = IndexFile(self.file).header
        except (FileNotFoundError, IndexFileError):
            return None
        known = self.about["make"] is not None
        return header if known and {key: header.get(key) for key in self.about} == self.about else None

    def complete(self, dataset: Any, make: Make) -> bool:
        """Make the file, unless it is there and of these samples. Returns whether it was made."""
        first, last = self.about["first"], self.about["last"]
        if not self.named:
            found, again = self.alike(), Watched(dataset)
            if found and found["contents"] is not None:
                read(again, first, last, rows=not isinstance(make, _Values) or isinstance(make.metric, Metric))
                if found["contents"] == again.contents.checksum:
                    return False
        samples = dataset if self.named else Watched(dataset)
        values = make(samples, first, last)
        refuse_unordered(values, first)
        contents = {} if self.named else {"contents": samples.contents.checksum}
        index = Index(values)
        write_index(self.file, self.about | contents | {"count": len(values)}, [values], [index.samples])
        return True


def _checksum(make: Make) -> str | None:
    contents = Contents()
    contents.add(make)
    return contents.checksum


_worker: list[tuple[Any, Make]] = []  # what a process of the pool was begun with


def _begin(parent: int, dataset: Any, make: Make) -> None:
    end_with(parent)  # or it would wait for parts forever, as each process of a pool holds the pool's pipes open
    _worker[:] = [(dataset, make)]


def _complete(part: _Part) -> bool:
    return part.complete(*_worker[0])


@dataclass(frozen=True)
class _Values:
    """The pass that gives values."""

    metric: Metric | Callable[[Any], float]

    def __call__(self, dataset: Any, first: int, last: int) -> np.ndarray:
        return values_of(dataset, self.metric, first, last)


def _maker(metric: str | Callable[[Any], float], job: _Job) -> Make:
    """What makes values, after the pass over the samples that "rarity" takes before."""
    if metric == "length":
        return _Values(Length())
    if metric == "rarity":
        counts = [IndexFile(file).values for file in job.files("counts", counts_of)]
        return _Values(Rarity(reduce(added, counts)))
    assert not isinstance(metric, str)  # the names are those above
    return _Values(metric)


def _require_sendable(metric: Any) -> None:
    try:
        pickle.dumps(metric)
    except Exception as error:  # what the metric's own class raises too
        raise BatchError(
            f"analyze: metric={metric!r} cannot be sent to processes ({error}): define it in a module, or use processes=1"
        ) from None


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder of an index's parts, for one process at a time."""
    folder = path.with_name(f"{path.name}.parts")
    make_folder(folder)
    lock = locked(folder, os.O_RDONLY)
    if lock is None:
        raise IndexFileError(f"another process is writing {path}: wait until it ends, or give another path")
    try:
        yield folder
    finally:
        lock.close()


# The merging of sorted parts into one order, in bounded memory.


class _RankRun(NamedTuple):
    """The ranks from ``low`` to before ``high`` of a part, whose samples are numbered from ``first`` on."""

    part: Index
    first: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low

    def value(self, rank: int) -> float:
        return float(self.part.values[self.part.samples[rank]])

    def samples(self, low: int, high: int) -> np.ndarray:
        """Numbers of the samples at ranks, as int64."""
        return self.part.samples[low:high].astype(np.int64) + self.first


def merged(parts: Sequence[Index], room: int) -> Iterator[np.ndarray]:
    """The samples of all parts in the order of their values, those of one value in their own order, as arrays.

    Where the parts have more than ``room`` samples they are divided at one of the values, as quicksort does, which for sorted
    parts takes a look-up in each.

    Args:
        parts: of samples that follow each other.
        room: the number of samples that are sorted, or read, at once.
    """
    firsts = accumulate((len(part) for part in parts), initial=0)
    left = [[_RankRun(part, first, 0, len(part)) for part, first in zip(parts, firsts)]]
    while left:
        runs = [run for run in left.pop() if run.size]
        if sum(run.size for run in runs) <= room:
            yield _sorted(runs)
            continue
        largest = max(runs, key=lambda run: run.size)
        pivot = largest.value((largest.low + largest.high) // 2)
        below = [bisect.bisect_left(range(run.high), pivot, run.low, key=run.value) for run in runs]
        up_to = [bisect.bisect_right(range(run.high), pivot, run.low, key=run.value) for run in runs]
        if not any(start > run.low for start, run in zip(below, runs)):  # what is next has the pivot's value
            for run, end in zip(runs, up_to):
                for low in range(run.low, end, room):
                    yield run.samples(low, min(low + room, end))
            left.append([run._replace(low=end) for run, end in zip(runs, up_to)])
        else:
            left.append([run._replace(low=start) for run, start in zip(runs, below)])
            left.append([run._replace(high=start) for run, start in zip(runs, below)])


def _sorted(runs: Sequence[_RankRun]) -> np.ndarray:
    if not runs:
        return np.empty(0, np.int64)
    values = [run.part.values[run.part.samples[run.low : run.high]] for run in runs]
    samples = [run.samples(run.low, run.high) for run in runs]
    return np.concatenate(samples)[np.argsort(np.concatenate(values), kind="stable")]


# Checksums of what values hold, by which another dataset or function is told from the same one.


class Contents:
    """A checksum of values, in the order in which they are added. Functions count by their code and what they close over,
    tensors by their elements."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._whole = True

    def add(self, value: Any) -> None:
        """Add a value."""
        try:
            _Writing(SimpleNamespace(write=self._digest.update)).dump(value)
        except Exception:  # what the value's own classes raise where they cannot be written
            self._whole = False

    @property
    def checksum(self) -> str | None:
        """The checksum; None if a value cannot be written, and so not be recognised."""
        return self._digest.hexdigest() if self._whole else None


class _Writing(pickle.Pickler):
    """Values as bytes, which are never read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            elements = raw_bytes(value.cpu().contiguous())
            return tuple, ((str(value.dtype), tuple(value.shape), elements.numpy().tobytes()),)
        if isinstance(value, FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__code__, value.__defaults__, value.__kwdefaults__, held),)
        if isinstance(value, CodeType):
            return tuple, ((value.co_code, value.co_names, value.co_consts),)
        return NotImplemented


class Watched:
    """A dataset, with a checksum ``contents`` of the samples that are read of it."""

    contents: Contents
    rows_at: Callable[[Any], Any]

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.contents = dataset, Contents()
        if hasattr(dataset, "rows_at"):
            self.rows_at = lambda indices: self._seen(dataset.rows_at(indices))

    def __getitem__(self, index: int) -> Any:
        return self._seen(self._dataset[index])

    def _seen(self, read: Any) -> Any:
        self.contents.add(read)
        return read

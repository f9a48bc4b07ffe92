"""The samples of a dataset by a metric: the value of each sample, and the samples in the order of their values.

Index files are `headed_file`s b"SHARDIDX" with two little-endian arrays: the values as f64, and the samples as u32, or u64
where there are 2^32 or more.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data.arrays import as_array
from shardlib.data.headed_file import INDEX, START, header_of, new_file, require_checksum
from shardlib.errors import BatchError, ShardlibError


class IndexFileError(ShardlibError, ValueError):
    """A file that is no index file, or a damaged one."""


class Index:
    """A metric of each sample of a dataset. ``len(index)`` is the number of samples.

    Args:
        values: the value of each sample, (N,): finite numbers.
        samples: the samples in the order of their values, (N,); those of one value in their own order. By default they are
            sorted now.

    Attributes:
        values: by the samples' own numbers, not in order: ``values[samples]`` ascends.
        samples: the first has the smallest value.

    Raises:
        BatchError: values that are not a list of finite numbers, or none.

    >>> index = sl.data.Index([0.5, 0.1, 0.9, 0.1])
    >>> index.samples.tolist(), index.up_to(0.5)
    ([1, 3, 0, 2], 3)
    """

    def __init__(self, values: Any, samples: np.ndarray | None = None) -> None:
        self.values = as_array(values)
        if self.values.ndim != 1 or self.values.dtype.kind not in "iuf" or not len(self.values):
            raise BatchError(
                f"Index: values of {self.values.dtype} and shape {self.values.shape}: give one number for each sample"
            )
        if samples is None:
            refuse_unordered(self.values, 0)
            samples = np.argsort(self.values, kind="stable")
        self.samples = samples

    def __len__(self) -> int:
        return len(self.values)

    def up_to(self, value: float) -> int:
        """The number of samples with at most ``value``: they are the first in ``samples``. Reads log₂ N values."""
        return bisect.bisect_right(range(len(self)), value, key=lambda rank: self.values[self.samples[rank]])

    def require_of(self, dataset: str | None) -> None:
        """Refuse a dataset that this is not the index of, if both say what they are of."""


class IndexFile(Index):
    """An `Index` in a file, mapped into memory; `analyze` makes one.

    Attributes:
        path: the file.
        header: with ``count``, ``metric``, ``dataset`` (what was analysed) and ``blake2b``.

    Raises:
        IndexFileError: another file, or one that is cut.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header = header_of(self.path, INDEX, IndexFileError)
        count, dtype = self.header["count"], _dtype_of(self.header["count"])
        wanted, found = START + count * (8 + dtype.itemsize), self.path.stat().st_size
        if found != wanted:
            raise IndexFileError(
                f"{self.path} has {found} bytes, and its header says {wanted}: it was cut or changed; write it anew with "
                "shardlib analyze"
            )
        values = np.memmap(self.path, "<f8", "r", START, (count,))
        super().__init__(values, np.memmap(self.path, dtype, "r", START + 8 * count, (count,)))

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexFile, (self.path,)  # a worker maps the file itself

    def require_of(self, dataset: str | None) -> None:
        mine = self.header["dataset"]
        if None not in (mine, dataset) and mine != dataset:
            raise BatchError(
                f"curriculum: {self.path} is an index of {mine}, and the dataset is {dataset}: analyse this dataset"
            )

    def verify(self) -> None:
        """Read the whole file and compare its checksum.

        Raises:
            IndexFileError: it is another.
        """
        arrays, said = (self.values, self.samples), self.header["blake2b"]
        require_checksum(self.path, arrays, said, IndexFileError, "write it anew with shardlib analyze")


def write_index(path: Path, about: dict[str, Any], values: Iterable[np.ndarray], samples: Iterable[np.ndarray]) -> None:
    """Write an index file of ``about["count"]`` samples, whose arrays come in parts."""
    dtype = _dtype_of(about["count"])
    with new_file(path, INDEX) as file:
        for part in values:
            file.write(part.astype("<f8").tobytes())
        for part in samples:
            file.write(part.astype(dtype).tobytes())
        file.header = about


def _dtype_of(count: int) -> np.dtype:
    return np.dtype("<u4" if count < 1 << 32 else "<u8")


def refuse_unordered(values: np.ndarray, first: int) -> None:
    """Raise `BatchError` for values that are not finite; the first belongs to sample ``first``."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise BatchError(
            f"the metric of sample {first + int(wrong[0])} is {values[wrong[0]]}, as of {wrong.size} samples: it must be a "
            "finite number for every sample"
        )

"""Token files and index files: arrays with a header, written once, complete or not there at all.

Layout: 8 bytes that say what the file is; the length of the header as a little-endian u64; the header, JSON padded with
spaces up to byte 4,096; the arrays, little-endian, each from a multiple of 8 bytes on. Token files have the tokens, in the
header's dtype, and the documents' ends as u64, in tokens from the start. Index files have the values as f64, and the samples
as u32, or u64 where there are 2^32 or more.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from shardlib.common.disk import sync_folder
from shardlib.data.rows import as_array
from shardlib.errors import BatchError, ShardlibError

START = 4096  # the first array's byte
CHUNK = 1 << 20  # elements that are read at once where a whole array is
_LONGEST = 3000  # bytes of a tokenizer's name in JSON


class TokenFileError(ShardlibError, ValueError):
    """A file that is no token file, or a damaged one."""


class IndexFileError(ShardlibError, ValueError):
    """A file that is no index file, or a damaged one."""


class FileKind(NamedTuple):
    """A kind of file: the bytes that it begins with, its name with an article, the command that writes one, and its error."""

    magic: bytes
    name: str
    command: str
    error: type[Exception]


_TOKENS = FileKind(b"SHARDTOK", "a token file", "shardlib tokenize", TokenFileError)
_INDEX = FileKind(b"SHARDIDX", "an index file", "shardlib analyze", IndexFileError)


def kind_of(start: bytes) -> FileKind | None:
    """The kind of a file that begins so; None if it is of another format. Whatever reads such a file asks first."""
    return next((kind for kind in (_TOKENS, _INDEX) if start.startswith(kind.magic)), None)


class MappedFile:
    """A file of one kind, mapped into memory."""

    path: Path

    _kind: ClassVar[FileKind]

    def __init__(self, path: str | Path) -> None:
        self.path, kind = Path(path), self._kind
        with open(self.path, "rb") as file:
            start = file.read(START)
        found, length = kind_of(start), int.from_bytes(start[8:16], "little")
        if found != kind or not 0 < length <= len(start) - 16:
            other = f" but {found.name}" if found and found != kind else ""
            raise kind.error(f"{self.path} is not {kind.name}{other}; make one with {kind.command}")
        self.header: dict[str, Any] = json.loads(start[16 : 16 + length])
        if self.header.get("version") != 1:
            raise kind.error(f"{self.path} has format {self.header.get('version')}, not 1: update shardlib")

    def _mapped(self, *described: tuple[Any, int]) -> Sequence[np.ndarray]:
        """The arrays, of dtypes and lengths, which are all that the file has behind the header."""
        places, end = [], START
        for dtype, count in described:
            end += -end % 8
            places.append((dtype, count, end))
            end += np.dtype(dtype).itemsize * count
        if (found := self.path.stat().st_size) != end:
            remedy = f"write it anew with {self._kind.command}"
            raise self._kind.error(f"{self.path} has {found} bytes of {end}: it was cut or changed; {remedy}")
        self._arrays = [np.memmap(self.path, dtype, "r", at, (count,)) for dtype, count, at in places]
        return self._arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # a worker maps the file itself; its arrays are not sent

    def verify(self) -> None:
        """Read the whole file and compare its checksum.

        Raises:
            TokenFileError, IndexFileError: it is another.
        """
        found, said = checksum_of(self._arrays), self.header["blake2b"]
        if found != said:
            raise self._kind.error(
                f"{self.path} is damaged: its checksum is {found}, not {said}; write it anew with {self._kind.command}"
            )


def checksum_of(arrays: Iterable[np.ndarray]) -> str:
    """The checksum of a file that has these arrays, read a part at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].tobytes())
    return digest.hexdigest()


class NewFile:
    """A file that is being written, by `new_file`; its writer sets the ``header``."""

    def __init__(self, file: IO[bytes], kind: FileKind) -> None:
        self.header: dict[str, Any] = {}
        self._file, self._magic, self._digest = file, kind.magic, hashlib.blake2b(digest_size=16)
        file.write(b"\0" * START)

    def write(self, data: bytes) -> None:
        """Append bytes of an array."""
        self._file.write(data)
        self._digest.update(data)

    def align(self) -> None:
        """Go to the next multiple of 8 bytes, where an array may begin."""
        self._file.write(b"\0" * (-self._file.tell() % 8))

    def finish(self) -> None:
        """Write the header, and wait until all is on the disk."""
        text = json.dumps({"version": 1} | self.header | {"blake2b": self._digest.hexdigest()}).encode()
        if len(text) > START - 16:
            raise ValueError(f"a header of {len(text)} bytes, and {START - 16} are the most")
        self._file.seek(0)
        self._file.write(self._magic + len(text).to_bytes(8, "little") + text.ljust(START - 16))
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def new_file(path: Path, kind: FileKind) -> Iterator[NewFile]:
    """A file to write, which gets its name when the block ends and all of it is on the disk.

    So a crash leaves the old file, if there was one, or the new one; and so does an error in the block.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            made = NewFile(file, kind)
            yield made
            made.finish()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_tokens(
    path: str | Path, documents: Iterable[Any], *, vocabulary: int = 256, tokenizer: str = "bytes"
) -> TokenFile:
    """Write documents of tokens to a file for `tokens` and `packed`, and return it.

    Memory holds one document at a time. The file gets its name when all of it is on the disk, so that a crash leaves the old
    file, if there was one, or the new one.

    Args:
        documents: sequences of tokens (lists, arrays, bytes). Empty ones are left out.
        vocabulary: the number of different tokens. Up to 256 a token takes one byte, up to 65,536 two, above that four.
        tokenizer: the tokenizer's name, for the header.

    Raises:
        TokenFileError: a token outside the vocabulary, or no tokens at all. There is then no new file.

    >>> file = sl.data.write_tokens("text.tokens", [b"one document", b"another"])
    >>> len(file), file.documents
    (19, 2)
    """
    path = Path(path)
    dtype = np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, _TOKENS) as file, tempfile.TemporaryFile(dir=path.parent) as ends:
        count, number = 0, 0
        for number, document in enumerate(documents):
            found = _checked(document, vocabulary, number)
            if found.size:
                file.write(found.astype(dtype).tobytes())
                count += found.size
                ends.write(np.uint64(count).astype("<u8").tobytes())
        if not count:
            raise TokenFileError(f"write_tokens: the {number} documents for {path} have no tokens")
        if len(json.dumps(tokenizer)) > _LONGEST:
            raise TokenFileError(f"write_tokens: a tokenizer's name of {len(tokenizer)} characters is too long")
        file.align()
        file.header = {
            "dtype": dtype.str,
            "count": count,
            "documents": ends.tell() // 8,
            "vocabulary": vocabulary,
            "tokenizer": tokenizer,
        }
        ends.seek(0)
        while chunk := ends.read(CHUNK):
            file.write(chunk)
    return TokenFile(path)


def _checked(document: Any, vocabulary: int, number: int) -> np.ndarray:
    found, fault = tokens_in(document)
    if fault:
        raise TokenFileError(f"write_tokens: document {number} is {fault}, not a list of tokens")
    if found.size and not 0 <= found.min() <= found.max() < vocabulary:
        raise TokenFileError(
            f"write_tokens: document {number} has tokens from {found.min()} to {found.max()}, outside a vocabulary of "
            f"{vocabulary}; give vocabulary={int(found.max()) + 1} or more"
        )
    return found


def tokens_in(document: Any) -> tuple[np.ndarray, str]:
    """The tokens of a document; and what it is if it has none, or ""."""
    found = np.frombuffer(document, np.uint8) if isinstance(document, (bytes, bytearray)) else as_array(document)
    wrong = found.ndim != 1 or (found.size and found.dtype.kind not in "iu")
    return found, f"{found.dtype} of shape {found.shape}" if wrong else ""


class TokenFile(MappedFile):
    """A token file, mapped into memory. ``len(file)`` is its number of tokens.

    Attributes:
        path: the file.
        header: the header, with ``dtype``, ``count``, ``documents``, ``vocabulary``, ``tokenizer`` and ``blake2b``.
        tokens: all tokens, (count,), of the dtype in which they are stored.
        ends: the end of each document, in tokens from the start, (documents,).

    Raises:
        TokenFileError: another file, or one that is cut.
        FileNotFoundError: there is no such file.
    """

    tokens: np.ndarray
    ends: np.ndarray
    _kind = _TOKENS

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.tokens, self.ends = self._mapped((self.header["dtype"], len(self)), ("<u8", self.documents))

    def __len__(self) -> int:
        return self.header["count"]

    @property
    def documents(self) -> int:
        return self.header["documents"]


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
        self.values: np.ndarray = as_array(values)
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


class IndexFile(MappedFile, Index):
    """An `Index` in a file, mapped into memory; `analyze` makes one.

    Attributes:
        path: the file.
        header: with ``count``, ``metric``, ``dataset`` (what was analysed) and ``blake2b``.

    Raises:
        IndexFileError: another file, or one that is cut.
        FileNotFoundError: there is no such file.
    """

    _kind = _INDEX

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        count = self.header["count"]
        Index.__init__(self, *self._mapped(("<f8", count), (_dtype_of(count), count)))

    def require_of(self, dataset: str | None) -> None:
        mine = self.header["dataset"]
        if None not in (mine, dataset) and mine != dataset:
            raise BatchError(
                f"curriculum: {self.path} is an index of {mine}, and the dataset is {dataset}: analyse this dataset"
            )


def write_index(path: Path, about: dict[str, Any], values: Iterable[np.ndarray], samples: Iterable[np.ndarray]) -> None:
    """Write an index file of ``about["count"]`` samples, whose arrays come in parts."""
    with new_file(path, _INDEX) as file:
        for parts, dtype in ((values, "<f8"), (samples, _dtype_of(about["count"]))):
            for part in parts:
                file.write(part.astype(dtype).tobytes())
        file.header = about


def _dtype_of(count: int) -> str:
    return "<u4" if count < 1 << 32 else "<u8"


def refuse_unordered(values: np.ndarray, first: int) -> None:
    """Raise `BatchError` for values that are not finite; the first belongs to sample ``first``."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise BatchError(
            f"the metric of sample {first + int(wrong[0])} is {values[wrong[0]]}, as of {wrong.size} samples: give finite "
            "numbers"
        )

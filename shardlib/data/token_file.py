"""Files of tokens, read through a memory map.

A `headed_file` b"SHARDTOK". Its arrays, little-endian: the tokens, in the header's dtype; from the next multiple of 8 on, the
documents' ends as u64, in tokens from the start.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data.arrays import as_array
from shardlib.data.headed_file import CHUNK, START, TOKENS, header_of, new_file, require_checksum
from shardlib.errors import ShardlibError

_LONGEST = 3000  # bytes of a tokenizer's name in JSON


class TokenFileError(ShardlibError, ValueError):
    """A file that is no token file, or a damaged one."""


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
    with new_file(path, TOKENS) as file, tempfile.TemporaryFile(dir=path.parent) as ends:
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


class TokenFile:
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

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header = header_of(self.path, TOKENS, TokenFileError)
        count, dtype = self.header["count"], np.dtype(self.header["dtype"])
        ends = START + count * dtype.itemsize
        ends += -ends % 8
        wanted, found = ends + 8 * self.header["documents"], self.path.stat().st_size
        if found != wanted:
            raise TokenFileError(
                f"{self.path} has {found} bytes, and its header says {wanted}: it was cut or changed; write it anew with "
                "shardlib tokenize"
            )
        self.tokens = np.memmap(self.path, dtype, "r", START, (count,))
        self.ends = np.memmap(self.path, "<u8", "r", ends, (self.header["documents"],))

    def __len__(self) -> int:
        return self.header["count"]

    @property
    def documents(self) -> int:
        return self.header["documents"]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path,)  # a worker maps the file itself; the tokens are not sent to it

    def verify(self) -> None:
        """Read the whole file and compare its checksum.

        Raises:
            TokenFileError: it is another.
        """
        arrays, said = (self.tokens, self.ends), self.header["blake2b"]
        require_checksum(self.path, arrays, said, TokenFileError, "write it anew with shardlib tokenize")


def _checked(document: Any, vocabulary: int, number: int) -> np.ndarray:
    given = np.frombuffer(document, np.uint8) if isinstance(document, (bytes, bytearray)) else as_array(document)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TokenFileError(
            f"write_tokens: document {number} is {given.dtype} of shape {given.shape}, not a list of tokens"
        )
    if given.size and not 0 <= given.min() <= given.max() < vocabulary:
        raise TokenFileError(
            f"write_tokens: document {number} has tokens from {given.min()} to {given.max()}, outside a vocabulary of "
            f"{vocabulary}; give vocabulary={int(given.max()) + 1} or more"
        )
    return given

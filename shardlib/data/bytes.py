"""A text file or folder as one array of bytes, split and sampled without any state to save.

A batch is a function of (seed, step) alone. So a run that is resumed at step s gets the batches of the uninterrupted run, and
any number of ranks share the same global batch.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardlib.data.files import TokenFile, TokenFileError, kind_of
from shardlib.rng import Key

_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_CHUNK = 16 * 1024  # bytes: long against a training sequence, short against the text


def load_bytes(path: str | Path | None = None) -> np.ndarray:
    """The bytes of a file, or of all files below a folder in the order of their paths: (N,) uint8.

    Without a path, the ``.py`` files of the running Python's standard library, without its tests. In a folder, hidden files
    and files that contain a zero byte (not text) are left out. Of a token file of bytes the tokens are taken.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: there is no text at it.
        TokenFileError: a token file of other tokens than bytes, or a damaged one; or an index file.
    """
    if path is None:
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        root, pattern = Path(path), "*"
    if root.is_file():
        contents = [_content(root)[0]]
    elif root.is_dir():
        contents = [content for content, is_text in map(_content, _files(root, pattern)) if is_text]
    else:
        raise FileNotFoundError(f"no file or folder of text at {root}")
    text = np.frombuffer(b"".join(contents), dtype=np.uint8)
    if not text.size:
        raise ValueError(f"no text in {root}")
    return text


def split(data: np.ndarray, validation: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Split ``data`` (N,) into training and validation bytes, the same way every time.

    Evenly spaced chunks of 16 KiB (shorter ones where the text is short) are for validation, so that both splits have text
    from every region. ``validation`` is the share of these chunks.

    Raises:
        ValueError: ``validation`` lies outside (0, 0.5], or the text is too short.
    """
    if not 0 < validation <= 0.5:
        raise ValueError(f"split: validation={validation}, but it must lie in (0, 0.5]")
    every = round(1 / validation)
    chunk = min(_CHUNK, len(data) // every)
    if chunk == 0:
        raise ValueError(f"split: {len(data)} bytes are too few to set {validation:.0%} of them aside")
    held_out = (np.arange(len(data)) // chunk) % every == every - 1
    return data[~held_out], data[held_out]


def batch_at(
    data: np.ndarray, batch: int, sequence: int, *, seed: int, step: int, rank: int = 0, ranks: int = 1
) -> dict[str, Tensor]:
    """This rank's rows of the global batch of one step, drawn at random from ``data`` (N,) uint8.

    ``batch`` is the number of rows of the global batch; rank r gets rows r·batch/ranks to (r+1)·batch/ranks. Returns
    ``{"tokens": (batch/ranks, sequence), "targets": same}`` int64, where targets are one byte ahead of tokens.

    Raises:
        ValueError: ``ranks`` does not divide ``batch``, or ``data`` is not longer than ``sequence``.
    """
    if batch % ranks:
        raise ValueError(
            f"a global batch of {batch} rows does not divide over {ranks} ranks; choose a multiple of {ranks}, for example "
            f"{max(1, batch // ranks) * ranks}"
        )
    _check_length(data, sequence)
    # Raw counter-based bits: NumPy promises that these never change, unlike the results of a generator's methods.
    bits = np.random.Philox(key=np.array([Key(seed).seed, step], dtype=np.uint64)).random_raw(batch)
    starts = (bits % np.uint64(len(data) - sequence)).astype(np.int64)
    rows = batch // ranks
    return _windows_at(data, starts[rank * rows : (rank + 1) * rows], sequence)


def batches(
    data: np.ndarray,
    batch: int,
    sequence: int,
    *,
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[dict[str, Tensor]]:
    """The endless sequence of ``batch_at`` from ``step`` on."""
    while True:
        yield batch_at(data, batch, sequence, seed=seed, step=step, rank=rank, ranks=ranks)
        step += 1


def windows(data: np.ndarray, batch: int, sequence: int, *, limit: int) -> Iterator[dict[str, Tensor]]:
    """At most ``limit`` batches of windows that do not overlap, evenly spaced over ``data``, for evaluation.

    Every batch is ``{"tokens": (batch, sequence), "targets": same}`` int64. All batches are full, so that the mean over
    batches is the mean over bytes.

    Raises:
        ValueError: ``data`` does not fill one batch.
    """
    _check_length(data, sequence)
    available = (len(data) - 1) // sequence
    count = min(limit, available // batch)
    if count == 0:
        raise ValueError(
            f"{len(data)} bytes hold {available} windows of {sequence}, fewer than a batch of {batch}; use a smaller batch "
            "or more text"
        )
    chosen = np.arange(count * batch, dtype=np.int64) * available // (count * batch)
    for rows in chosen.reshape(count, batch):
        yield _windows_at(data, rows * sequence, sequence)


def _files(root: Path, pattern: str) -> list[Path]:
    def wanted(file: Path) -> bool:
        names = file.relative_to(root).parts
        return not _SKIPPED.intersection(names) and not any(name.startswith(".") for name in names)

    return sorted(file for file in root.rglob(pattern) if wanted(file) and file.is_file())


def _content(file: Path) -> tuple[bytes, bool]:
    """A file's bytes, those of a token file's tokens, and whether they are text."""
    content = file.read_bytes()
    if kind_of(content) is None:
        return content, b"\0" not in content
    found = TokenFile(file)
    if (name := found.header["tokenizer"]) != "bytes":
        raise TokenFileError(
            f"{file} has tokens of the tokenizer {name!r}, not bytes: read them with sl.data.tokens or sl.data.packed, or "
            "write bytes with shardlib tokenize --tokenizer bytes"
        )
    return found.tokens.tobytes(), True


def _check_length(data: np.ndarray, sequence: int) -> None:
    if len(data) <= sequence:
        raise ValueError(f"{len(data)} bytes hold no window of {sequence} with the byte that follows it")


def _windows_at(data: np.ndarray, starts: np.ndarray, sequence: int) -> dict[str, Tensor]:
    bytes_ = torch.from_numpy(data[starts[:, None] + np.arange(sequence + 1)].astype(np.int64))
    return {"tokens": bytes_[:, :-1].contiguous(), "targets": bytes_[:, 1:].contiguous()}

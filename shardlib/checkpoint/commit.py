"""The folder of a checkpoint, from its first file to its last day: it is there wholly or not at all, whatever crashes.

All files are written into ``step-N.TOKEN.partial``, and are on the disk before that folder is renamed to ``step-N``. Each
attempt has a token of its own, so that none writes into another's folder. Rank 0 holds a lock on the folder while the attempt
lives, so that none removes another's. An old checkpoint is renamed to ``step-N.deleted`` before the first of its files goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from shardlib.checkpoint import manifest, writing
from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.manifest import Manifest
from shardlib.common.disk import locked, make_folder, sync_folder
from shardlib.common.systems import LINUX, MACOS, require_system
from shardlib.errors import CheckpointError, RankFailure, listing

_NAMED = re.compile(r"step-(\d+)(?:\.(\d+))?")
_POLL = 0.01  # seconds between looks for other ranks' reports


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, in the order of their steps.

    >>> sl.checkpoint.complete("nothing-there")
    []
    """
    found = [(named, path) for path in Path(folder).glob("step-*") if (named := _NAMED.fullmatch(path.name))]
    return [
        path for *_, path in sorted((int(named[1]), int(named[2] or 0), path) for named, path in found if _has(path))
    ]


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return _has(checkpoint) and not checkpoint.suffix.endswith((".partial", ".deleted"))


def _has(checkpoint: Path) -> bool:
    return (checkpoint / manifest.NAME).exists()


def step_of(checkpoint: str | Path) -> int:
    """The step in a checkpoint's name.

    Raises:
        ValueError: it is no name of a checkpoint.

    >>> sl.checkpoint.step_of("run/step-00000100")
    100
    """
    named = _NAMED.fullmatch(Path(checkpoint).name)
    if named is None:
        raise ValueError(f"{checkpoint} is no checkpoint's name; these are like step-00000100")
    return int(named[1])


class Commit:
    """The writing of one checkpoint by all ranks, of which this object is one rank's part.

    Ranks tell rank 0 by small files in the folder that theirs are written, so that no rank needs another one's network
    while it trains on.

    Args:
        folder: the folder of checkpoints.
        facts: the manifest, without tensors and files.
        rank, ranks: this rank's number, and how many there are.
        keep: how many checkpoints stay in the folder.
    """

    def __init__(self, folder: Path, facts: Manifest, rank: int, ranks: int, keep: int) -> None:
        require_system("saving a checkpoint", LINUX, MACOS)
        self._folder, self._facts, self._rank, self._ranks, self._keep = folder, facts, rank, ranks, keep
        self.step: int = facts.step

    def prepare(self) -> str:
        """Make the empty folder to write into, and return the attempt's token. For rank 0. Raises `CheckpointError` if
        there is a checkpoint of a later step."""
        make_folder(self._folder)
        later = [path.name for path in complete(self._folder) if step_of(path) > self._facts.step]
        if later:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of later steps ({', '.join(later)}) than {self._facts.step}. Save to "
                "another folder, or remove them"
            )
        for partial in self._folder.glob("step-*.partial"):
            _discard_abandoned(partial)
        for deleted in self._folder.glob("step-*.deleted"):
            _discard(deleted)
        lock = None
        while lock is None:  # until nobody takes the new folder for an abandoned one
            token = secrets.token_hex(4)
            self.begin(token)
            os.mkdir(self._partial)
            lock = locked(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, lock.close)
        return token

    def begin(self, token: str) -> None:
        """Take part in the attempt that rank 0 has prepared. For every rank, before it writes."""
        self._partial = self._folder / f"{self._name}.{token}.partial"

    @property
    def _name(self) -> str:
        return f"step-{self.step:08d}"

    def write(self, fragments: Iterable[Fragment]) -> None:
        """Write this rank's fragments, and report to rank 0 that they are on the disk, or why not."""
        file = f"__{self._rank}_0.distcp"
        try:
            written = writing.write(self._partial / file, fragments)
        except BaseException as error:
            self._report({"failure": f"{type(error).__name__}: {error}"})
            raise
        part = replace(self._facts, notes={}, specs={}, tensors=written.tensors, files={file: written.bytes})
        self._report({"manifest": part.dumps().decode()})

    def finish(self, awaited: Callable[[Collection[int]], None] = lambda ranks: None) -> Path:
        """Make a checkpoint of what all ranks have written, and return its folder. For rank 0; raises `RankFailure` if ranks
        could not write.

        Args:
            awaited: called with the ranks whose reports are awaited, again and again; raises to stop.
        """
        try:
            return self._finished(awaited)
        finally:
            self._unlock()

    def _finished(self, awaited: Callable[[Collection[int]], None]) -> Path:
        whole = self._merged(self._reports(awaited))
        content = manifest.metadata_of(whole)
        whole.files[manifest.METADATA], whole.whole_files[manifest.METADATA] = len(content), zlib.crc32(content)
        for name, text in ((manifest.METADATA, content), (manifest.NAME, whole.dumps())):
            _write_synced(self._partial / name, text)
        for report in self._partial.glob("*.report"):
            report.unlink()
        sync_folder(self._partial)
        final = self._free_name()
        os.rename(self._partial, final)
        sync_folder(self._folder)
        same_step = [path for path in complete(self._folder) if path != final and step_of(path) == self._facts.step]
        for old in (*same_step, *[path for path in complete(self._folder) if path not in same_step][: -self._keep]):
            remove(old)
        return final

    def _free_name(self) -> Path:
        """``step-N``; ``step-N.2`` and so on if a checkpoint of this step is there, which stays until the new one is."""
        final = self._folder / self._name
        number = 2
        while final.exists():
            final, number = self._folder / f"{self._name}.{number}", number + 1
        return final

    def _report(self, report: dict[str, str]) -> None:
        """Give rank 0 a report, all at once."""
        name = self._partial / f"{self._rank}.report"
        unfinished = name.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report))
        os.rename(unfinished, name)

    def _reports(self, awaited: Callable[[Collection[int]], None]) -> list[dict[str, str]]:
        paths = [self._partial / f"{rank}.report" for rank in range(self._ranks)]
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            awaited(missing)
            time.sleep(_POLL)
        reports = [json.loads(path.read_text()) for path in paths]
        failures = [f"rank {rank}: {report['failure']}" for rank, report in enumerate(reports) if "failure" in report]
        if failures:
            raise RankFailure(f"the checkpoint was not written:\n{listing(failures)}")
        return reports

    def _merged(self, reports: list[dict[str, str]]) -> Manifest:
        whole = replace(self._facts, tensors={}, files={}, whole_files={})
        for report in reports:
            part = manifest.loads(report["manifest"].encode(), self._partial)
            whole.files |= part.files
            for name, entry in part.tensors.items():
                known = whole.tensors.setdefault(name, replace(entry, chunks=[]))
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    kinds = f"{known.dtype} {known.shape} and {entry.dtype} {entry.shape}"
                    raise CheckpointError(f"{name}: ranks hold it in different dtypes or shapes: {kinds}")
                known.chunks += entry.chunks
        return whole


def remove(checkpoint: str | Path) -> None:
    """Delete a checkpoint: no crash leaves a part of it under its name. For one rank.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> sl.checkpoint.remove(sl.checkpoint.save("run", state))
    >>> print(sl.checkpoint.latest("run"))
    None
    """
    checkpoint = Path(checkpoint)
    deleted = checkpoint.with_name(f"{checkpoint.name}.deleted")
    os.rename(checkpoint, deleted)
    sync_folder(checkpoint.parent)
    _discard(deleted)


def _discard_abandoned(partial: Path) -> None:
    """Remove a partial checkpoint, unless rank 0 of its attempt lives."""
    with contextlib.suppress(FileNotFoundError):  # it has got its name, or another attempt removes it too
        # Without locks nobody is kept from removing the folder, and its writers notice.
        lock = locked(partial, os.O_RDONLY | os.O_DIRECTORY)
        if lock is not None:
            try:
                shutil.rmtree(partial)
            finally:
                lock.close()


def _discard(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another attempt may remove it at the same time
        shutil.rmtree(folder)


def _write_synced(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writing.write_all(fd, [content], 0)
        os.fsync(fd)
    finally:
        os.close(fd)

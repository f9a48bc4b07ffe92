"""A copy of the project in which a defect can be planted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = ("shardlib", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "Makefile")


@dataclass(frozen=True)
class Defect:
    """One expression of the package that is replaced by a wrong one.

    Attributes:
        name: what the table calls it.
        kind: of mistake.
        file: below ``shardlib/``.
        what: is wrong then.
        old, new: source text; the old one occurs once in the file.
        tests: those most likely to notice; the other fast ones are tried if they do not.
    """

    name: str
    kind: str
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """Where it is, to be imported; "" for what is no Python."""
        path = Path("shardlib", self.file)
        parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
        return ".".join(parts) if path.suffix == ".py" else ""

    def planted(self, source: str) -> str:
        """The file's text with it.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {times} times in shardlib/{self.file}; write it anew")
        return source.replace(self.old, self.new)


class Copy:
    """The project in a folder of its own.

    Compiled files of Python come along and none are written, so that none can be of another text than the source.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.root.mkdir()
        for name in _COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.root / name)

    @contextmanager
    def with_defect(self, defect: Defect | None) -> Iterator[None]:
        """While the defect is planted; without one nothing is changed."""
        if defect is None:
            yield
            return
        path = self.root / "shardlib" / defect.file
        source, times = path.read_text(), path.stat()
        path.write_text(defect.planted(source))
        try:
            yield
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

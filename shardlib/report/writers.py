"""Writers of metrics to CSV and JSONL files, to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.optional import require


class CsvWriter:
    """A table with a row per step; a value that comes up later than others gets a column of its own then.

    Args:
        path: the file; folders on the way are made.
        start: the number of steps done before: rows up to it are kept, later ones (of an interrupted run) dropped.
    """

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        self._path = Path(path)
        lines = _complete_lines(self._path) if start else []
        rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= start]
        self._columns = list(rows[0]) if rows else ["step"]
        self._rewrite(rows)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._file.close()
            rows = list(csv.DictReader(_complete_lines(self._path)))
            self._columns += new
            self._rewrite(rows)
        self._table.writerow({"step": step, **values})

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._file = _open(self._path)
        self._table = csv.DictWriter(self._file, self._columns)
        self._table.writeheader()
        self._table.writerows(rows)


class JsonlWriter:
    """A JSON object per step and line, null for what is not finite. Arguments as `CsvWriter`'s."""

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        kept = [line for line in (_complete_lines(Path(path)) if start else []) if json.loads(line)["step"] <= start]
        self._file = _open(Path(path))
        self._file.writelines(kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        told = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON knows no others
        self._file.write(json.dumps({"step": step, **told}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard.

    Args:
        folder: of its event files.
        start: the number of steps done before: what an interrupted run wrote of later ones is hidden.

    Raises:
        MissingPackage: TensorBoard is not installed; tells what to install.
    """

    def __init__(self, folder: str | Path, *, start: int = 0) -> None:
        self._writer = require_packages("tensorboard").SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases.

    Args:
        options: of ``wandb.init``: project, name, config, or id and resume to go on with a run.

    Raises:
        MissingPackage: wandb is not installed; tells what to install.
    """

    def __init__(self, **options: Any) -> None:
        self._run = require_packages("wandb").init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def require_packages(kind: str) -> Any:
    """The module that a kind of writer ("csv", "jsonl", "tensorboard", "wandb") works by; None where it needs none.

    To be asked before the work whose metrics are to be written, by every rank alike.

    Raises:
        MissingPackage: it is not installed.
    """
    module = _MODULES.get(kind)
    return None if module is None else require(module, f"a writer for {kind}", kind, "logging")


def _open(path: Path) -> Any:
    """To write, line by line: what an interrupted run leaves is whole lines but for the last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", buffering=1, newline="")


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

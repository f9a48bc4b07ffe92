"""Writers of metrics to CSV and JSONL files, to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.common.optional import require


class CsvWriter:
    """A writer of a CSV table with a row per step; a value that first appears in a later step adds a column.

    Args:
        path: the file; missing folders are created.
        start: the number of steps done before; rows of later steps, from an interrupted run, are removed.
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
    """A writer of one JSON object per step and line, with null for values that are not finite.

    Args:
        path, start: as for `CsvWriter`.
    """

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        kept = [line for line in (_complete_lines(Path(path)) if start else []) if json.loads(line)["step"] <= start]
        self._file = _open(Path(path))
        self._file.writelines(kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """A writer of scalars for TensorBoard.

    Args:
        folder: of the event files.
        start: the number of steps done before; events of later steps, from an interrupted run, are hidden.

    Raises:
        MissingPackage: TensorBoard is not installed; the message says what to install.
    """

    def __init__(self, folder: str | Path, *, start: int = 0) -> None:
        self._writer = require_packages("tensorboard").SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A writer to a run of Weights & Biases.

    Args:
        options: arguments of ``wandb.init``: project, name, config, or id and resume to continue a run.

    Raises:
        MissingPackage: wandb is not installed; the message says what to install.
    """

    def __init__(self, **options: Any) -> None:
        self._run = require_packages("wandb").init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def require_packages(kind: str) -> Any:
    """The module that a kind of writer ("csv", "jsonl", "tensorboard", "wandb") needs, or None.

    Call this on every rank before a run, so that a missing package is found before the work is done.

    Raises:
        MissingPackage: the module is not installed.
    """
    module = _MODULES.get(kind)
    return None if module is None else require(module, f"a writer for {kind}", kind, "logging")


def _open(path: Path) -> Any:
    """Opens a file with line buffering: an interrupted run leaves complete lines, except for the last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", buffering=1, newline="")


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

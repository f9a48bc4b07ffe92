"""Metrics of steps: `Log`, which does not wait for the device in every step, and writers to files and services."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from shardlib.common.optional import require
from shardlib.tree import flatten


class Writer(Protocol):
    """A destination of metrics: a file, a screen, a service."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes ``values`` of one step; steps rise from call to call, and steps may have different values."""
        ...

    def close(self) -> None:
        """Ends writing; `write` is not called again."""
        ...


class Log:
    """Passes metrics to writers; a ``with`` statement closes them.

    Tensors stay on their device and are read together, in one copy, once ``every`` seconds have passed, so that a step does
    not wait for the one before. Without writers (such as on other ranks than 0) nothing is stored or read.
    """

    def __init__(self, *writers: Writer, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._writers, self._every, self._clock = writers, every, clock
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._read = clock()

    def write(self, step: int, metrics: Any) -> None:
        """Adds a pytree of 0-d tensors and numbers, each under its path ("aux/accuracy"), to the values of ``step``.

        Raises:
            ValueError: some leaves are not single numbers; lists them.
        """
        if not self._writers:
            return
        paths, leaves, _ = flatten(metrics)
        # Copied, as the caller may change tensors before they are read, such as hyper-parameters in a state.
        values = {path: _copy(leaf) for path, leaf in zip(paths, leaves, strict=True)}
        failures = [f"{path}: {_kind(value)}" for path, value in values.items() if not _is_number(value)]
        if failures:
            raise ValueError(
                f"metrics of step {step} are not numbers: {', '.join(failures)}; reduce them, or leave them out"
            )
        if self._pending and self._pending[-1][0] == step:
            self._pending[-1][1].update(values)
            return
        if self._clock() - self._read >= self._every:
            self.flush()
        self._pending.append((step, values))

    def flush(self) -> None:
        """Reads the pending metrics and passes them to the writers."""
        pending, self._pending = _read(self._pending), []
        self._read = self._clock()
        for step, values in pending:
            for writer in self._writers:
                writer.write(step, values)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            for writer in self._writers:
                writer.close()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _read(pending: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, float]]]:
    """The pending values as numbers, with one copy from each device."""
    tensors = [value for _, values in pending for value in values.values() if isinstance(value, torch.Tensor)]
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    copies = {
        device: iter(torch.stack([t.reshape(()).to(torch.float64) for t in tensors if t.device == device]).tolist())
        for device in devices
    }

    def number(value: Any) -> float:
        return next(copies[value.device]) if isinstance(value, torch.Tensor) else float(value)

    return [(step, {name: number(value) for name, value in values.items()}) for step, values in pending]


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

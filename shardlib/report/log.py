"""`Log`: metrics of steps for writers, without waiting for the device in every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch

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

"""`Log`: a step's metrics to writers, without waiting for the device at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch

from shardlib.tree import flatten


class Writer(Protocol):
    """Where metrics go: a file, a screen, a service."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """``values`` of one step; steps rise from call to call, and not every step has every value."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Log:
    """Hands metrics to writers; to be used in a ``with`` statement, which closes them.

    Tensors are kept where they are and read together, in one copy from the device, once ``every`` seconds have passed: a step
    does not wait for the one before it. Without writers (on other ranks than 0, say) nothing is kept or read.
    """

    def __init__(self, *writers: Writer, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._writers, self._every, self._clock = writers, every, clock
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._read = clock()

    def write(self, step: int, metrics: Any) -> None:
        """Note a pytree of 0-d tensors and numbers, each under its path ("aux/accuracy"). One step may have several.

        Raises:
            ValueError: something that is not one number; lists them.
        """
        if not self._writers:
            return
        paths, leaves, _ = flatten(metrics)
        # Copies: what is given may be written to before it is read, as a state's hyper-parameters may.
        values = {path: _copy(leaf) for path, leaf in zip(paths, leaves, strict=True)}
        wrong = [f"{path}: {_told(value)}" for path, value in values.items() if not _is_number(value)]
        if wrong:
            raise ValueError(
                f"metrics of step {step} are not numbers: {', '.join(wrong)}; reduce them, or leave them out"
            )
        if self._pending and self._pending[-1][0] == step:
            self._pending[-1][1].update(values)
            return
        if self._clock() - self._read >= self._every:
            self.flush()
        self._pending.append((step, values))

    def flush(self) -> None:
        """Read what is pending and hand it to the writers."""
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


def _told(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _read(pending: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, float]]]:
    """All values as numbers, by one copy from each device."""
    tensors = [value for _, values in pending for value in values.values() if isinstance(value, torch.Tensor)]
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    copies = {
        device: iter(torch.stack([t.reshape(()).to(torch.float64) for t in tensors if t.device == device]).tolist())
        for device in devices
    }

    def number(value: Any) -> float:
        return next(copies[value.device]) if isinstance(value, torch.Tensor) else float(value)

    return [(step, {name: number(value) for name, value in values.items()}) for step, values in pending]

"""The clock of a measured step: told where parts of the step begin and end. Outside of measurements there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol


class Clock(Protocol):
    """What measures the parts of a step, one within another."""

    def span(self, kind: str, name: str) -> AbstractContextManager[None]:
        """A context whose code is a part of the step: of a kind ("optimizer", "offload", "wait"), and which one."""
        ...


current_clock: ContextVar[Clock | None] = ContextVar("current_clock", default=None)
_UNTIMED = nullcontext()


def timed(kind: str, name: str = "") -> AbstractContextManager[None]:
    """A context whose code is a part of the step: see `Clock.span`."""
    clock = current_clock.get()
    return _UNTIMED if clock is None else clock.span(kind, name)

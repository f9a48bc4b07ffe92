"""The clock of a measured step: told where parts of the step begin and end. Outside of measurements there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from shardlib.common.environment import environment


class Clock(Protocol):
    """What measures the parts of a step, one within another."""

    def span(self, kind: str, name: str) -> AbstractContextManager[None]:
        """A context whose code is a part of the step: of a kind ("optimizer", "offload", "wait"), and which one."""
        ...


_UNTIMED = nullcontext()


def timed(kind: str, name: str = "") -> AbstractContextManager[None]:
    """A context whose code is a part of the step: see `Clock.span`."""
    clock: Clock | None = environment().clock
    return _UNTIMED if clock is None else clock.span(kind, name)

"""The plan as users see it: a value that prints itself and counts what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from shardlib.common.display.panels import Panel, Shown
from shardlib.plan import program, shown, text
from shardlib.plan.memory import held_bytes, live_bytes, peak_bytes
from shardlib.plan.program import Message, Program
from shardlib.plan.value import PlanValue


@dataclass(frozen=True, repr=False)
class Plan(PlanValue, Shown):
    """A frozen, comparable, device-free description of a sharded training state; ``print`` it.

    Its fields are those of `shardlib.plan.value.PlanValue`.
    """

    def bytes(self, role: str, memory: str | None = None) -> int:
        """Bytes that one rank holds of a role, or of "total": see `shardlib.plan.memory.held_bytes`."""
        return held_bytes(self, role, memory)

    @cached_property
    def live_bytes(self) -> int | None:
        """Peak bytes of a micro-batch beside the state, None without a trace: see `shardlib.plan.memory.live_bytes`."""
        return live_bytes(self)

    @cached_property
    def peak_bytes(self) -> int | None:
        """Peak bytes of the device's memory in a step, None without a trace: see `shardlib.plan.memory.peak_bytes`."""
        return peak_bytes(self)

    def payload(self, *, owned: bool = False) -> dict[str, int]:
        """Axis -> bytes that one rank sends in a step: see `shardlib.plan.program.payload`."""
        return program.payload(self, owned=owned)

    def transfers(self) -> dict[str, int]:
        """Bytes copied between memories in a step: see `shardlib.plan.program.transfers`."""
        return program.transfers(self)

    def messages(self, *, owned: bool = False, moves: bool = False) -> Iterator[Message]:
        """The messages of a step, in order: see `shardlib.plan.program.messages`."""
        return program.messages(self, owned=owned, moves=moves)

    def __str__(self) -> str:
        return text.describe(self)

    __repr__ = __str__

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show."""
        return shown.plan_panels(self)

    def program(self, *, owned: bool = False) -> Program:
        """What one rank does in a step, in order; call it on one rank's part of a plan (`at`), and ``print`` it."""
        return Program.of(self, owned)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """This plan, which never changes."""
        return self

"""The plan as users see it: a value that prints itself and counts what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib.plan.memory import held_bytes, live_bytes, peak_bytes
from shardlib.plan.payload import Message, messages, moved, payload
from shardlib.plan.program.program import Program
from shardlib.plan.text import describe
from shardlib.plan.value import PlanValue


@dataclass(frozen=True, repr=False)
class Plan(PlanValue):
    """A frozen, comparable, device-free description of a sharded training state; ``print`` it.

    Its fields are those of `shardlib.plan.value.PlanValue`.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """This plan, which never changes."""
        return self

    def bytes(self, role: str, memory: str | None = None) -> int:
        """Bytes one rank holds of a role of the state, or of its "total", in one memory or in all: see
        `shardlib.plan.memory.held_bytes`."""
        return held_bytes(self, role, memory)

    @cached_property
    def live_bytes(self) -> int | None:
        """Peak bytes that a rank holds in addition to ``bytes("total")``: see `shardlib.plan.memory.live_bytes`."""
        return live_bytes(self)

    @cached_property
    def peak_bytes(self) -> int | None:
        """Peak bytes that a rank holds in a step: see `shardlib.plan.memory.peak_bytes`."""
        return peak_bytes(self)

    def payload(self, *, owned: bool = False) -> dict[str, int]:
        """Payload bytes one rank sends per step, by axis: see `shardlib.plan.payload.payload`."""
        return payload(self, owned=owned)

    def transfers(self) -> dict[str, int]:
        """Bytes one rank moves between the device's memory and others in a step: see `shardlib.plan.payload.moved`."""
        return moved(self)

    def messages(self, *, owned: bool = False) -> Iterator[Message]:
        """Every message of a step; call it on one rank's part of a plan (`at`). See `shardlib.plan.payload.messages`."""
        return messages(self, owned=owned)

    def program(self, *, owned: bool = False) -> Program:
        """What one rank does in a step, in order; call it on one rank's part of a plan (`at`), and ``print`` it."""
        return Program.of(self, owned)

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__

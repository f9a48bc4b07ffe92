"""The plan as users see it: a value that prints itself and counts what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from shardlib.common.display.panels import Panel, Shown
from shardlib.plan import memory, program, shown, text
from shardlib.plan.program import Program
from shardlib.plan.value import PlanValue


@dataclass(frozen=True, repr=False)
class Plan(PlanValue, Shown):
    """A frozen, comparable, device-free description of a sharded training state; ``print`` it.

    Its fields are those of `shardlib.plan.value.PlanValue`.
    """

    bytes = memory.held_bytes
    live_bytes = cached_property(memory.live_bytes)
    peak_bytes = cached_property(memory.peak_bytes)
    payload = program.payload
    transfers = program.transfers
    messages = program.messages
    __str__ = __repr__ = text.describe

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show."""
        return shown.plan_panels(self)

    def program(self, *, owned: bool = False) -> Program:
        """What one rank does in a step, in order; call it on one rank's part of a plan (`at`), and ``print`` it."""
        return Program.of(self, owned)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """This plan, which never changes."""
        return self

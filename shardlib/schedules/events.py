"""Actions, and when they run."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action: computation or message of one stage for one micro-batch.

    A backward is whole (``B``) or split: ``I`` computes the gradient of the stage's input, which the stage before
    waits for, and ``W`` the gradients of its weights, which no stage waits for. The four kinds of message occur only in
    orders that `lower` made; the stage of a message is the stage whose rank sends or receives it.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the papers' letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


class Action(NamedTuple):
    """One action, printed as ``2F3``: stage 2, forward, micro-batch 3 (messages: ``0SEND_F1``)."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Event(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    end: float

"""The messages that one rank sends in a step, and what it moves between memories: a visit of its program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardlib.mesh.memories import DIRECTIONS
from shardlib.plan.program.program import Program
from shardlib.plan.value import PlanValue


@dataclass(frozen=True)
class Message:
    """A message that one rank sends over an axis, or a transfer between memories, ``times`` times in a step.

    Attributes:
        what, when, form: as of `shardlib.plan.program.ops.Send`.
        axis: of the mesh; of a transfer "down" from the device or "up" to it, or "read" or "written" of what rests in files.
        payload: bytes of one message.
        collectives: that one message is: a fraction, or several, where what a loss exchanges is divided evenly among units.
    """

    what: str
    axis: str
    when: str
    form: str
    payload: int
    times: int = 1
    collectives: float = 1.0

    @property
    def bytes(self) -> int:
        return self.payload * self.times


def messages(plan: PlanValue, *, owned: bool = False) -> Iterator[Message]:
    """Every message that one rank sends in a step; ``plan`` is that rank's part of the plan."""
    return _sends(plan, owned, moves=False)


def transfers(plan: PlanValue) -> Iterator[Message]:
    """Every transfer of one rank between memories in a step; ``plan`` is that rank's part of the plan."""
    return _sends(plan, False, moves=True)


def _sends(plan: PlanValue, owned: bool, moves: bool) -> Iterator[Message]:
    for send, times in Program.of(plan, owned).sends():
        if send.moves is moves:
            yield Message(send.what, send.link, send.when, send.form, send.bytes, times, send.collectives)


def payload(plan: PlanValue, *, owned: bool = False) -> dict[str, int]:
    """Axis -> payload bytes one rank sends per step, without scalars.

    Activations and what passes between stages are counted if the plan was traced, the optimizer's messages (whole leaves,
    sums of rows) if the plan was made with an optimizer. With several stages, the maximum over ranks for each axis.

    Args:
        owned: counts a step whose optimizer sums over its axis itself (1-bit Adam, once its variance is frozen).
    """
    axes = [axis for axis, size in plan.sizes.items() if size > 1]
    return _most([messages(view, owned=owned) for view in plan.views], axes)


def moved(plan: PlanValue) -> dict[str, int]:
    """Direction -> bytes that one rank moves in a step, without numbers such as the loss; "read" and "written" if the plan
    knows of states in files. With several stages, the maximum over ranks."""
    found = [list(transfers(view)) for view in plan.views]
    ways = dict.fromkeys([*DIRECTIONS, *(transfer.axis for each in found for transfer in each)])
    return _most(found, ways)


def _most(views: Iterable[Iterable[Message]], axes: Iterable[str]) -> dict[str, int]:
    """Axis -> bytes of the view that has most."""
    most = dict.fromkeys(axes, 0)
    for view in views:
        total = dict.fromkeys(most, 0)
        for message in view:
            if message.axis in total:
                total[message.axis] += message.bytes
        most = {axis: max(most[axis], count) for axis, count in total.items()}
    return most

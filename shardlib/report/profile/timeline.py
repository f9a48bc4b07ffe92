"""The timeline of one step on one rank: parts within parts, whose own times add up to the step's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        kind: "compute", "optimizer", "communication" (starting exchanges), "wait", "offload", or "other" for the rest.
        way: of computation "forward", "backward" or "recompute"; of exchanges and their waits the mesh axis.
        name: of computation the block's unit; of exchanges what they are for; of offload the way of the copy.
    """

    kind: str
    way: str = ""
    name: str = ""


REST = Part("other")


class Span(NamedTuple):
    """A stretch of time in one part.

    Attributes:
        start, end: seconds from the beginning of the step.
        depth: how many spans it lies in; 0 for the step itself.
        own: seconds in no span within it.
    """

    part: Part
    start: float
    end: float
    depth: int
    own: float


class StepTimeline:
    """The parts of one step as they begin and end.

    On a device with streams an event is recorded on the current stream at each boundary, so that times are those of the
    device, which the host does not wait for before the step has ended.

    Attributes:
        began: when the step began, by `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._mark = time.perf_counter if self._device is None else self._event
        self._spans: list[list[object]] = []  # part, first mark, last mark, depth
        self._open: list[int] = []
        self.began: float = time.perf_counter()
        self._first = self._mark()

    @property
    def now(self) -> Part:
        """The innermost part."""
        return self._spans[self._open[-1]][0] if self._open else REST  # type: ignore[return-value]

    def open(self, part: Part) -> int:
        """Begin a part within the present one; returns its place, for `turn` and `close`."""
        self._open.append(len(self._spans))
        self._spans.append([part, self._mark(), None, len(self._open)])
        return len(self._open)

    def turn(self, place: int, part: Part) -> None:
        """End the part at a place and begin another one there; within a further part nothing changes."""
        if len(self._open) == place and self.now != part:
            mark = self._mark()
            self._spans[self._open[-1]][2] = mark
            self._open[-1] = len(self._spans)
            self._spans.append([part, mark, None, place])

    def close(self, place: int) -> None:
        """End the part at a place, and what is open within it."""
        mark = self._mark()
        opened = self._open
        while len(opened) >= place:
            self._spans[opened.pop()][2] = mark

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """A context in which a part runs."""
        place = self.open(part)
        try:
            yield
        finally:
            self.close(place)

    def span(self, kind: str, name: str) -> AbstractContextManager[None]:
        """See `shardlib.common.environment.Clock`."""
        return self.within(Part(kind, name=name))

    def end(self) -> Sequence[Span]:
        """End the step, once the device is done with it; returns its spans, the step itself first."""
        if self._device is not None:
            with self.within(Part("wait", name="the device")):
                torch.accelerator.synchronize(self._device)
        self.close(1)
        last = self._mark()
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        found = [(REST, 0.0, self._since(last), 0)]
        found += [(part, self._since(first), self._since(end), depth) for part, first, end, depth in self._spans]  # type: ignore[misc]
        return _with_own(found)

    def _event(self) -> object:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _since(self, mark: object) -> float:
        """Seconds from the beginning of the step."""
        if isinstance(mark, float):
            return mark - self.began
        return self._first.elapsed_time(mark) / 1e3  # type: ignore[attr-defined]


def _with_own(spans: Sequence[tuple[Part, float, float, int]]) -> list[Span]:
    """Spans in the order in which they began, with their own times."""
    own = [end - start for _, start, end, _ in spans]
    around: list[int] = []
    for number, (_, start, end, depth) in enumerate(spans):
        del around[depth:]
        if around:
            own[around[-1]] -= end - start
        around.append(number)
    return [Span(*span, seconds) for span, seconds in zip(spans, own, strict=True)]

"""What a rank does: the calls that it has made and the one that it waits in, for reports of ranks that hang.

The executor names the unit or leaf that a call is for (`naming`), and `make_train_step` the step (`in_step`). A call keeps
the names that were given when it was started, so that its report is right even when it is waited for much later.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shardlib.common.tensors import dtype_name

_LIBRARIES = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_STANDARD = sysconfig.get_path("stdlib") + os.sep


@dataclass(slots=True)
class CollectiveCall:
    """A collective, or a message between two ranks, as one rank makes it.

    Attributes:
        op: the operation.
        numel, dtype: the size of this rank's tensor; None for objects.
        axis: the mesh axis.
        members: the ranks that make the call, by their numbers in the world; of a message source and destination.
        number: how many calls these members have made before it on this axis, and this one.
        path: the unit or leaf that the call is for, or "".
        step: the step that it is part of; None outside of steps.
    """

    op: str
    numel: int | None
    dtype: torch.dtype | None
    axis: str
    members: tuple[int, ...]
    number: int
    path: str
    step: int | None

    @property
    def what(self) -> str:
        """The operation, its size, and its axis."""
        size = "" if self.dtype is None else f"({self.numel} × {dtype_name(self.dtype)})"
        return f"{self.op}{size} on axis {self.axis!r}"

    @property
    def place(self) -> str:
        """The call's number, and what it is for."""
        return f"call {self.number}{_label(self.path, self.step)}"

    def joined_by(self, other: CollectiveCall) -> bool:
        """Whether ``other`` is this call as another member makes it, or a later call of the same members."""
        return (other.axis, other.members) == (self.axis, self.members) and other.number >= self.number


class Series:
    """The calls of one group of ranks along an axis, on this rank.

    Attributes:
        last: the last call; None before the first.
    """

    def __init__(self, activity: Activity, axis: str, members: tuple[int, ...]) -> None:
        self._activity, self._axis, self._members = activity, axis, members
        self.last: CollectiveCall | None = None

    def call(self, op: str, tensor: torch.Tensor | None) -> CollectiveCall:
        """Note that this rank makes the next call."""
        number = 1 if self.last is None else self.last.number + 1
        numel, dtype = (None, None) if tensor is None else (tensor.numel(), tensor.dtype)
        names = self._activity
        self.last = CollectiveCall(op, numel, dtype, self._axis, self._members, number, names.path, names.step)
        return self.last


@dataclass
class State:
    """What a rank did at one moment, to be sent to other processes.

    Attributes:
        waits: the call that it waits in, or that has failed; None if it does something else.
        seconds: how long it has waited.
        failed: whether that call has failed.
        last: the last call of each group that the rank is a member of.
        line: the line of the user's code that the main thread runs.
        ended: how the program ended, or "".
    """

    waits: CollectiveCall | None
    seconds: float
    failed: bool
    last: list[CollectiveCall]
    line: str
    ended: str = ""


class Activity:
    """What one rank does.

    Attributes:
        path, step: the names that new calls get.
        waiting: the calls that it waits in and when each wait began, the innermost last.
        failed: the first call that failed, and the seconds that the rank had waited in it; None before.
    """

    path: str
    step: int | None

    def __init__(self) -> None:
        self.path, self.step = "", None
        self.waiting: list[tuple[CollectiveCall, float]] = []
        self.failed: tuple[CollectiveCall, float] | None = None
        self._series: dict[tuple[str, tuple[int, ...]], Series] = {}
        # Calls that the device waits in and this rank does not, oldest first: whether each is over, and since when.
        self._followed: deque[tuple[CollectiveCall, Callable[[], bool], float]] = deque(maxlen=1 << 16)

    @property
    def label(self) -> str:
        """What a call that is made now is for, as the end of a phrase."""
        return _label(self.path, self.step)

    def series(self, axis: str, members: tuple[int, ...]) -> Series:
        """The calls of ``members`` on ``axis``: one series for a process, whichever mesh a call is made through."""
        return self._series.setdefault((axis, members), Series(self, axis, members))

    def wait(self, call: CollectiveCall, wait: Callable[[], None]) -> None:
        """Call ``wait``, which waits in a call."""
        began = time.monotonic()
        self.waiting.append((call, began))
        try:
            wait()
        except RuntimeError:
            self.fail(call, time.monotonic() - began)
            raise
        finally:
            self.waiting.pop()

    def fail(self, call: CollectiveCall, seconds: float = 0.0) -> None:
        """Note that a call has failed, in which this rank had waited for some seconds."""
        self.failed = self.failed or (call, seconds)

    def follow(self, call: CollectiveCall, over: Callable[[], bool]) -> None:
        """Note that the device waits in a call, until ``over()``. Calls are over in the order in which they are followed."""
        self._followed.append((call, over, time.monotonic()))

    def overdue(self, seconds: float) -> bool:
        """Whether the device has waited for longer than this; then the oldest such call has failed."""
        while self._followed and self._followed[0][1]():
            self._followed.popleft()
        if not self._followed or time.monotonic() - self._followed[0][2] <= seconds:
            return False
        call, _, since = self._followed[0]
        self.fail(call, time.monotonic() - since)
        return True

    def state(self) -> State:
        """What the rank does now."""
        call, seconds = self.failed or (None, 0.0)
        if self.waiting and call is None:
            call, since = self.waiting[-1]
            seconds = time.monotonic() - since
        last = [series.last for series in list(self._series.values()) if series.last is not None]
        return State(call, seconds, self.failed is not None, last, _line_of_the_user())


_PROCESS = Activity()
# A simulated rank has its own. All threads of a process that is one rank share the process's.
_current: ContextVar[Activity] = ContextVar("activity", default=_PROCESS)


def here() -> Activity:
    """This rank's activity."""
    return _current.get()


def begin_rank() -> None:
    """Give the rank that is simulated in this context an activity of its own."""
    _current.set(Activity())


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Say what the calls are for that the enclosed code starts."""
    activity = here()
    before, activity.path = activity.path, path
    try:
        yield
    finally:
        activity.path = before


def in_step(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """A train step during which calls are known to belong to the step whose number the state has."""

    @functools.wraps(train_step)
    def named(state: Any, *args: Any, **kwargs: Any) -> Any:
        activity = here()
        before, activity.step = activity.step, getattr(state, "step", None)  # of what is no state, the step says so
        try:
            return train_step(state, *args, **kwargs)
        finally:
            activity.step = before

    return named


def _label(path: str, step: int | None) -> str:
    """The names of a call: ", for layers/3, in step 7"."""
    return (f", for {path}" if path else "") + (f", in step {step}" if step is not None else "")


def _line_of_the_user() -> str:
    """The line of neither a library nor torch nor shardlib that the main thread runs, as in a traceback; "" without one."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    return traceback.format_stack(frame, 1)[0].rstrip() if frame is not None else ""


def _of_a_library(file: str) -> bool:
    """Whether a file is part of Python, torch or shardlib."""
    inside = file.removeprefix(_STANDARD)
    return file.startswith(("<frozen", "<string>", *_LIBRARIES)) or (
        inside != file and not inside.startswith(("site-packages", "dist-pac"))
    )

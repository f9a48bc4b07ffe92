"""The progress of a training run in a terminal: step, loss, tokens per second, time left."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

_WINDOW = 10.0  # seconds over which the rate is averaged


class Progress:
    """A writer for `Log` that shows the progress of a run of ``steps`` steps; the `Log` closes it.

    On a terminal one line is redrawn in place; elsewhere a plain line is printed every ``every`` seconds and after the last
    step. Ranks other than 0 print nothing.

    Args:
        tokens_per_step: over all ranks.
        start: the number of steps done before, in a resumed run.
    """

    def __init__(
        self,
        steps: int,
        tokens_per_step: int,
        *,
        start: int = 0,
        rank: int = 0,
        every: float = 5.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._silent, self._every, self._clock = rank != 0, every, clock
        self._stream = stream if stream is not None else sys.stdout
        self._printed = clock()
        self._seen = deque([(self._printed, start)])
        self._loss: float | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)
        if not self._silent and self._stream.isatty():
            console = Console(file=self._stream)
            self._bar = Bar(BarColumn(bar_width=24), TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task(f"step {start}/{steps}", total=steps, completed=start)
            self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows that ``step`` steps are done; ``values["loss"]``, if there, is the loss of the last one (nats per token)."""
        self._loss, now = values.get("loss", self._loss), self._clock()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        if self._silent:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._line(step))
        elif now - self._printed >= self._every or step == self._steps:
            self._printed = now
            print(self._line(step), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays above the progress line."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif not self._silent:
            print(text, file=self._stream, flush=True)

    def _line(self, step: int) -> str:
        (begun, first), (now, last) = self._seen[0], self._seen[-1]
        line = f"step {step}/{self._steps}" + (f"  loss {self._loss:.3f}" if self._loss is not None else "")
        if last == first or now == begun:
            return line
        rate = (last - first) / (now - begun)  # steps per second
        left = round((self._steps - step) / rate)
        return f"{line}  {rate * self._tokens_per_step:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"

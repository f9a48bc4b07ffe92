"""The progress of a training run in a terminal: step, loss, tokens per second, time left."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn
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
        self._redraw: Callable[[int], None]
        self._screen: Bar | Live | None = None
        if not self._silent and self._stream.isatty():
            self._screen = self._opened(Console(file=self._stream), start)
            self._screen.start()

    def _opened(self, console: Console, start: int) -> Bar | Live:
        """What is redrawn in place."""
        bar = Bar(BarColumn(bar_width=24), TextColumn("{task.description}"), console=console)
        task = bar.add_task(f"step {start}/{self._steps}", total=self._steps, completed=start)
        self._redraw = lambda step: bar.update(task, completed=step, description=self._line(step))
        return bar

    def close(self) -> None:
        if self._screen is not None:
            self._screen.stop()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows that ``step`` steps are done; ``values["loss"]``, if there, is the loss of the last one (nats per token)."""
        self._loss, now = values.get("loss", self._loss), self._clock()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        if self._silent:
            return
        if self._screen is not None:
            self._redraw(step)
        elif now - self._printed >= self._every or step == self._steps:
            self._printed = now
            print(self._line(step), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays above the progress line."""
        if self._screen is not None:
            self._screen.console.print(text, markup=False, highlight=False)
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

"""How many ranks a supervised run may have, and what follows when they end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlib.mesh.launch.attempt import End
from shardlib.mesh.launch.supervised import RankProgress

_SAME_STEP = 3  # exceptions at one step after which the script is at fault
_LONGEST = 64  # checkpoints that pass, at most, before ranks which keep failing are taken back again


@dataclass(frozen=True)
class Counts:
    """Allowed numbers of ranks, ascending."""

    allowed: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Counts:
        """From ``4``, from a range ``2:4``, or from a list ``1,2,4``.

        Raises:
            ValueError: ``text`` is none of these.
        """
        if not re.fullmatch(r"\d+:\d+|\d+(,\d+)*", text):
            raise ValueError(f"{text!r} is no number of ranks; write 4, a range such as 2:4, or a list such as 1,2,4")
        if ":" in text:
            first, last = map(int, text.split(":"))
            allowed = tuple(range(first, last + 1))
        else:
            allowed = tuple(sorted(set(map(int, text.split(",")))))
        if not allowed or allowed[0] < 1:
            raise ValueError(f"{text!r} names no ranks; the numbers are at least 1, and a range ascends")
        return cls(allowed)

    def left(self, ranks: int) -> int:
        """The largest allowed number that is at most ``ranks``, else the smallest allowed."""
        return max((each for each in self.allowed if each <= ranks), default=self.allowed[0])


class Restarts:
    """What follows an attempt's end.

    Args:
        restarts: how often the run starts again after failures without a new step.

    Attributes:
        ranks: how many the next attempt has; None when there is no next one.
        why: in words, why there is none.
    """

    def __init__(self, counts: Counts, restarts: int) -> None:
        self._counts, self._restarts = counts, restarts
        self._furthest = 0  # the last step that any attempt has done
        # Since then: all failures, and the exceptions in a row at one step.
        self._failures = 0
        self._stuck: tuple[int | None, int] = None, 0
        self._wait = 1
        self._back = False  # whether ranks have just been taken back
        self.ranks: int | None = counts.allowed[-1]
        self.why = ""

    @property
    def saves(self) -> int:
        """After so many checkpoints the missing ranks are taken back; 0 if none is missing."""
        return 0 if self.ranks == self._counts.allowed[-1] else self._wait

    def after(self, end: End, progress: RankProgress) -> None:
        """Take note of an attempt's end."""
        assert self.ranks is not None
        if progress.step is not None and progress.step > self._furthest:
            self._furthest, self._failures, self._stuck = progress.step, 0, (None, 0)
        if end.resizes:
            self.ranks, self._back = self._counts.allowed[-1], True
        elif not end.how:
            self.ranks = None
        else:
            # Ranks that fail again as soon as they are taken back have to wait twice as long for the next time.
            if self._back:
                self._wait = 1 if progress.saved is not None else min(_LONGEST, 2 * self._wait)
            self._back = False
            self.ranks = self._counts.left(self.ranks - end.lost)
            self._count(end, progress)

    def _count(self, end: End, progress: RankProgress) -> None:
        self._failures += 1
        step, times = self._stuck
        self._stuck = (None, 0) if end.by_signal else (progress.step, times + 1 if step == progress.step else 1)
        if self._stuck[1] == _SAME_STEP:
            self.ranks, self.why = None, f"failed {_SAME_STEP} times in a row at the same step"
        elif self._failures > self._restarts:
            self.ranks, self.why = None, f"started again {self._restarts} times without a new step"

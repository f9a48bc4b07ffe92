"""`supervise`: start the ranks of a run, and start them again when one fails or a missing one comes back."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from shardlib.common.systems import LINUX, MACOS, require_system
from shardlib.mesh.launch import orphans, supervised
from shardlib.mesh.launch.processes import kill_rank, start_rank, threads_of
from shardlib.mesh.launch.supervised import RESIZE, STOPPING, RankProgress, exit_code

# One attempt of a supervised run: its ranks' processes, until they end.


_TEAR_DOWN = 30.0  # seconds that the other ranks have once the first has ended with one of them


@dataclass(frozen=True)
class End:
    """How an attempt ended.

    Attributes:
        code: 0, the code by which all ranks have agreed to end, or the exit code of the rank that failed first.
        how: the failure in words; "" without one.
        lost: the number of ranks that failed by themselves.
        by_signal: whether the rank was killed, so that its script need not be at fault.
    """

    code: int
    how: str = ""
    lost: int = 0
    by_signal: bool = False

    @property
    def resizes(self) -> bool:
        """Whether all ranks have ended to start again in another number."""
        return self.code == RESIZE and not self.how


class Attempt:
    """The processes of one attempt.

    Args:
        command: the program of each rank.
        ranks: how many there are.
        number: counts the attempts, from 0.
        saves: after so many checkpoints the ranks end with `RESIZE`; 0 for never, so that this code is a failure.
        threads: each rank's. Equal in all attempts, since sums inside a rank depend on it (`sl.reproducible`).

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, command: Sequence[str], ranks: int, number: int, saves: int, threads: str) -> None:
        self.ranks = ranks
        # A store of its own for each attempt: nothing of an earlier one is in it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Ranks end with these when all of them have agreed to end, and what they did is on the disk.
        self._codes = (*map(exit_code, STOPPING), *([RESIZE] if saves else []))
        self._agreed: float | None = None
        starter = [sys.executable, "-I", "-S", str(Path(orphans.__file__)), str(os.getpid())]
        more = {
            "TORCHELASTIC_RESTART_COUNT": str(number),
            supervised.ADDRESS: f"127.0.0.1:{self._store.port}",
            supervised.SAVES: str(saves),
            "OMP_NUM_THREADS": threads,
        }
        self._processes = [
            start_rank([*starter, *command], rank, ranks, self._store.port, more) for rank in range(ranks)
        ]

    def progress(self) -> RankProgress:
        """What the ranks have told so far."""
        return supervised.progress(self._store)

    def look(self) -> End | None:
        """How the attempt has ended, though ranks may be left to `kill`; None while it runs."""
        codes = [process.poll() for process in self._processes]
        ended = [code for code in codes if code is not None]
        if agreed := [code for code in ended if code in self._codes]:
            self._agreed = self._agreed or time.monotonic()
            if len(ended) < self.ranks and time.monotonic() < self._agreed + _TEAR_DOWN:
                return None
            return End(agreed[0])
        # A rank that was killed comes first: the others may have failed for want of it.
        failed = sorted((code > 0, rank, code) for rank, code in enumerate(codes) if code)
        if failed:
            by_code, rank, code = failed[0]
            lost = 1 if by_code else sum(not each for each, *_ in failed)
            if by_code:
                return End(code, f"rank {rank} of {self.ranks} exited with code {code}", lost)
            name = signal.Signals(-code).name
            return End(exit_code(-code), f"rank {rank} of {self.ranks} was killed by {name}", lost, by_signal=True)
        return End(0) if len(ended) == self.ranks else None

    def send(self, number: int) -> None:
        """Pass a signal on to all ranks."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            kill_rank(process)


# How many ranks a supervised run may have, and what follows when they end.


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

    why: str

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


_POLL = 0.02  # seconds between two looks at the ranks


def supervise(command: Sequence[str], counts: Counts, restarts: int, say: Callable[[str], None]) -> int:
    """Run ``command`` on as many ranks as ``counts`` allows until they are done; returns the exit code.

    When a rank fails the others are killed, and those that are left go on, from the newest checkpoint if the command
    restores it. They end at the next checkpoint (`Manager.step` does this), and all start again. SIGTERM and SIGUSR1 go to
    all ranks, whose end is then this run's. For the main thread.

    Args:
        restarts: how often ranks start again without a new step.
        say: gets one line for each failure, each restart and each recovery.
    """
    require_system("shardlib run", LINUX, MACOS)
    plan, threads = Restarts(counts, restarts), threads_of(counts.allowed[-1])
    since: float | None = None
    with _stopping() as received:
        number = 0
        while plan.ranks is not None:
            attempt = Attempt(command, plan.ranks, number, plan.saves, threads)
            try:
                end, progress = _watch(attempt, since, received, say)
                since, number = time.time(), number + 1
            finally:
                attempt.kill()
            at = f" after step {progress.step}" if progress.step is not None else " before its first step"
            if end.how:
                say(f"{end.how}{at}")
            if received and end.code:
                return exit_code(received[0])
            plan.after(end, progress)
            if end.resizes:
                say(f"step {progress.step} is saved: {plan.ranks} ranks start")
            elif plan.why:
                say(f"gives up: {plan.why}")
    return end.code


def _watch(
    attempt: Attempt, since: float | None, received: list[int], say: Callable[[str], None]
) -> tuple[End, RankProgress]:
    """Wait for the end of an attempt. Its recovery is measured from ``since``; None for the first attempt."""
    passed, said = 0, RankProgress()
    while True:
        end = attempt.look()
        progress = attempt.progress()
        if since is not None:
            if said.begun is None and progress.begun is not None:
                who = f"{attempt.ranks} ranks go" if attempt.ranks > 1 else "1 rank goes"
                say(f"{who} on from step {progress.begun}")
            if said.first is None and progress.first is not None and progress.begun is not None:
                say(f"step {progress.begun + 1} after {progress.first - since:.1f} s")
            said = progress
        if end is not None:
            return end, progress
        while passed < len(received):
            attempt.send(received[passed])
            passed += 1
        time.sleep(_POLL)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """The signals that arrive within the context and ask the run to end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    former = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

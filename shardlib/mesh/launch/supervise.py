"""`supervise`: start the ranks of a run, and start them again when one fails or a missing one comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from shardlib.mesh.launch import rank_process
from shardlib.mesh.launch.attempt import Attempt, End
from shardlib.mesh.launch.restarts import Counts, Restarts
from shardlib.mesh.launch.signals import STOPPING, exit_code
from shardlib.mesh.launch.supervised import RankProgress

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
    plan, threads = Restarts(counts, restarts), rank_process.threads(counts.allowed[-1])
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

"""What a rank hears and tells: signals that ask it to end, and how far it is, for the program that supervises it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

ADDRESS = "SHARDLIB_SUPERVISOR"  # host:port of the store that the supervisor hosts
SAVES = "SHARDLIB_SAVES"  # after so many checkpoints the ranks end, to start again with more ranks
RESIZE = 75  # the exit code of that end; EX_TEMPFAIL of sysexits.h
VARIABLES = (ADDRESS, SAVES)
_KEY = "shardlib/progress"


@dataclass
class RankProgress:
    """How far the ranks have come since they started.

    Attributes:
        begun: the step after which they went on.
        step: the last step that is done.
        saved: the step of the newest checkpoint that is on the disk; None when they have made none.
        first: when the first step was done, in `time.time`'s seconds.
    """

    begun: int | None = None
    step: int | None = None
    saved: int | None = None
    first: float | None = None


def progress(store: dist.Store) -> RankProgress:
    """What the ranks have written to the supervisor's store."""
    return RankProgress(**json.loads(store.get(_KEY))) if store.check([_KEY]) else RankProgress()


class Supervisor:
    """The program that supervises this rank, if there is one. Rank 0 speaks for all.

    Args:
        environment: this process's; None for a rank that is not supervised.
    """

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        environment = environment or {}
        self._progress = RankProgress()
        self._saves = int(environment.get(SAVES, "0"))
        self._store: dist.Store | None = None
        if ADDRESS in environment and environment["RANK"] == "0":
            host, _, port = environment[ADDRESS].rpartition(":")
            self._store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)

    def begun(self, step: int) -> None:
        """Say after which step the ranks go on. Later calls, after a roll-back, say nothing."""
        if self._progress.begun is None:
            self._progress.begun = step
            self._tell()

    def done(self, step: int) -> None:
        """Say that a step is done."""
        self.begun(step - 1)
        if self._progress.first is None:
            self._progress.first = time.time()
        self._progress.step = step
        self._tell()

    def saved(self, step: int) -> None:
        """Say that a checkpoint is on the disk."""
        self._progress.saved = step
        self._tell()

    def resizes(self) -> bool:
        """Whether the ranks end with the checkpoint that is due now. To be asked once for each."""
        self._saves -= 1
        return self._saves == 0

    def _tell(self) -> None:
        if self._store is not None:
            self._store.set(_KEY, json.dumps(asdict(self._progress)))


# Signals by which a scheduler or a user asks a run to end. They are taken note of, and acted on between two steps.


STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
INTERRUPT = signal.SIGINT  # Ctrl-C
# Seconds within which a further signal is the same one, which a scheduler sent to all and a launcher passes on.
_AGAIN = 5.0
_PRESSED = 0.3  # likewise after Ctrl-C; a user who presses the keys again takes longer


def exit_code(number: int) -> int:
    """The exit code that shells, Kubernetes and Slurm give a process that signal ``number`` ended."""
    return 128 + number


class Signals:
    """SIGTERM, SIGUSR1 and, with ``interrupt``, Ctrl-C while they are caught. For the main thread.

    Attributes:
        received: the first one since `catch`, or None.
    """

    def __init__(self, interrupt: bool) -> None:
        # A shell has its background jobs ignore Ctrl-C.
        heeded = interrupt and signal.getsignal(INTERRUPT) != signal.SIG_IGN
        self._caught = (*STOPPING, INTERRUPT) if heeded else STOPPING
        self.received: int | None = None
        self._at = 0.0
        self._former: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def catch(self) -> None:
        """Take note of signals from now on. Later ones, after a few seconds, act as they did before `catch`; a second Ctrl-C
        does at once."""
        if not self._former:
            self._former = {number: signal.signal(number, self._note) for number in self._caught}

    def release(self, *, again: bool = False) -> None:
        """Give the signals their former handlers back; with ``again``, one that was received acts as it did before."""
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}
        if again and self.received is not None:
            os.kill(os.getpid(), self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = number, time.monotonic()
        elif time.monotonic() > self._at + (_PRESSED if number == INTERRUPT else _AGAIN):
            self.received = number
            self.release(again=True)

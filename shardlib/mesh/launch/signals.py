"""Signals by which a scheduler or a user asks a run to end. They are taken note of, and acted on between two steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
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

"""Ends a rank's process when its parent ends, in whichever way the parent ends.

As a program, ``orphans.py PARENT COMMAND...`` becomes the command, which then ends with its parent (on Linux; elsewhere a
rank that is supervised ends when it next has something to say to its supervisor). It imports nothing of this library, and so
costs a few hundredths of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """End this process when its parent, of process id ``parent``, ends: by the kernel on Linux, elsewhere by a thread that
    looks every second."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_look, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before either could notice
        os._exit(1)


def become(parent: int, command: list[str]) -> None:
    """Turn this process into another program that ends when the parent ends: the kernel keeps to it across `exec`."""
    if sys.platform == "linux":
        end_with(parent)
    os.execvp(command[0], command)


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])

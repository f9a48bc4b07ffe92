"""A supervised run as seen from outside: its processes, their memory, and what the supervisor says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.soak.training import RANKS, losses_of

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched:
    """`shardlib run` of the training in a folder.

    Attributes:
        process: the supervisor's.
        lines: what it has said so far.
        memory: process id -> seconds since the run began, and resident bytes at that time.
    """

    def __init__(self, folder: Path, steps: int, ranks: str = RANKS) -> None:
        self._folder = folder
        script = ["-m", "benchmarks.soak.training", str(folder), str(steps)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardlib.commands", "run", "--ranks", ranks, *script],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.memory: dict[int, list[tuple[float, int]]] = {}
        self._began = time.monotonic()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks that run."""
        with suppress(OSError):
            return list(
                map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())
            )
        return []

    @property
    def doing(self) -> str:
        """What the ranks do now."""
        for pid in self.ranks:
            losses = self._folder / losses_of(self.process.pid, _variable(pid, "TORCHELASTIC_RESTART_COUNT"))
            if not losses.exists() or not losses.stat().st_size:
                return "as ranks started"
        return "in a save" if any(self._folder.glob("step-*.partial")) else "in a step"

    def sample(self) -> None:
        """Note the resident memory of all processes."""
        now = time.monotonic() - self._began
        for pid in (self.process.pid, *self.ranks):
            with suppress(OSError):
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                self.memory.setdefault(pid, []).append((now, resident))

    def wait(self) -> int:
        """The supervisor's exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("shardlib run: "):
                self.lines.append(line.removeprefix("shardlib run: ").strip())
                print(f"{time.monotonic() - self._began:7.1f} s  {self.lines[-1]}", flush=True)


def _variable(pid: int, name: str) -> str:
    """A variable of a process's environment; "" if it has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            if entry.startswith(f"{name}="):
                return entry.removeprefix(f"{name}=")
    return ""


def losses(folder: Path) -> list[tuple[int, str]]:
    """Each step that was done, with its loss, once for each time that it was done."""
    found = []
    for file in folder.glob("losses-*"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # not cut by a kill
                step, loss = line.split()
                found.append((int(step), loss))
    return found

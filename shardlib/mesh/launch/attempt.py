"""One attempt of a supervised run: its ranks' processes, until they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardlib.mesh.launch import orphans, rank_process, supervised
from shardlib.mesh.launch.signals import STOPPING, exit_code
from shardlib.mesh.launch.supervised import RESIZE, RankProgress

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
            rank_process.start([*starter, *command], rank, ranks, self._store.port, more) for rank in range(ranks)
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
            rank_process.kill(process)

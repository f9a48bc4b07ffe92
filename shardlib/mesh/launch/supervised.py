"""What the ranks of a run and the program that supervises it (`shardlib run`) tell each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

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

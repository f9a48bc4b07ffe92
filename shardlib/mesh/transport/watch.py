"""The watch of one process over its run: once a collective has failed anywhere, every rank says what it does, then stops.

A thread of each process looks into the run's store every second. A rank whose collective fails raises the alarm there. Then
every rank writes what it does into the store, reads what the others do, and prints its own report, which the ranks that
failed raise as well. A rank that sleeps, waits for data or computes answers by its thread; one that is dead or stopped does
not. Nobody ends before all that answer have printed: a launcher stops all ranks as soon as the first ends.

The thread has a connection to the store of its own, since a call that waits for the store keeps others of its connection out.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch.distributed as dist

from shardlib.common._compat import clone_store, default_store
from shardlib.mesh.transport import activity, vitals
from shardlib.mesh.transport.report import States, on_rank

# The exit code of a process whose program did not notice a report; the others end by the error that they raise.
EXIT_HUNG = 70

_POLL = 1.0  # seconds between two looks for an alarm
_CLOSE = 0.05  # seconds between two looks while a report is made
_ANSWER = 10.0  # seconds that ranks have to answer
_GRACE = 5.0  # seconds that a program has to end by itself after a report
_TEAR_DOWN = 30.0  # seconds that a process has to end after its program, if there was a report
_GONE = "the store by which ranks answer is gone, with torchrun or the rank that hosted it"

_watch: ProcessWatch | None = None


def begin(ends: bool = False, timeout: float | None = None) -> ProcessWatch:
    """This process's watch of the run, which begins with the first call after the start of torch.distributed.

    Args:
        ends: whether to print reports, and to end a process whose program does not notice them.
        timeout: seconds that a device may wait in a collective that the program does not wait in; None for any time.
    """
    global _watch
    store = default_store()
    if _watch is not None and _watch.store is not store:
        _watch.stop()
        _watch = None
    if _watch is None:
        _watch = ProcessWatch(store, ends, timeout)
    return _watch


def lost() -> frozenset[int]:
    """The ranks that did not answer when there was a report; none before."""
    return frozenset() if _watch is None else _watch.lost


class ProcessWatch:
    """The watch of one process; see `begin`.

    Attributes:
        store: the run's store.
        lost: the ranks that did not answer when there was a report; none before.
    """

    def __init__(self, store: dist.Store, ends: bool, timeout: float | None) -> None:
        self.store, self._ends, self._timeout = store, ends, timeout
        # torchrun's store outlives restarts. `rendezvous` gives each start a part of it; a user's start may use it as it is.
        # (Each of several agents counts its own restarts. Ranks that do not find each other then say so.)
        attempt = "" if ends else os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._store = dist.PrefixStore(f"shardlib/watch/{attempt}", clone_store(store))
        self._rank, self._activity = dist.get_rank(), activity.here()
        self._others = set(range(dist.get_world_size())) - {self._rank}
        self._states: States = dict.fromkeys(self._others, _GONE)
        self.lost: frozenset[int] = frozenset()
        self._identities: dict[int, str] = {}
        self._raises = False  # whether the program is given the report
        self._wake, self._over, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._store.set(f"process/{self._rank}", vitals.identity())
        self._thread = threading.Thread(target=self._run, name="shardlib watch", daemon=True)
        self._thread.start()
        self._pid = os.getpid()
        atexit.register(self._leave)

    def report(self, error: BaseException) -> str:
        """The report of this rank, whose call has failed with ``error``: what all ranks did when the first call failed."""
        self._raises = True
        self._wake.set()
        self._reported.wait(3 * _ANSWER)
        return self._text(self._activity.state(), _reason(error))

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._wake.set()
        self._thread.join(3 * _ANSWER)

    def _leave(self) -> None:
        """Stop the thread, as no thread may wait for the store when the interpreter ends, and leave word for other ranks."""
        if os.getpid() != self._pid:
            return  # a fork of the process
        self.stop()
        if self._ends and self._reported.is_set():
            faulthandler.dump_traceback_later(_TEAR_DOWN, exit=True)
        error = getattr(sys, "last_value", None)
        how = f" with {type(error).__name__}: {error}" if error is not None else ": its program came to its end"
        state = replace(self._activity.state(), waits=None, ended=f"has ended{how}")
        with suppress(RuntimeError, ValueError):
            if not self._store.check([f"state/{self._rank}"]):
                self._store.set(f"state/{self._rank}", pickle.dumps(state).hex())
                self._store.check(["alarm"])  # once the store has answered this it has the state too

    def _run(self) -> None:
        try:
            while not self._alarm():
                if self._over.is_set():
                    return
                self._wake.wait(_POLL)
            self._answer()
        except (RuntimeError, ValueError):
            return  # the store is gone, as when the rank that hosted it has ended
        finally:
            self._reported.set()
        if self._ends:
            self._wait_for_the_end()

    def _alarm(self) -> bool:
        """Whether a report is due."""
        late = self._timeout is not None and self._activity.overdue(self._timeout)
        return late or self._raises or self._store.check(["alarm"])

    def _answer(self) -> None:
        """Take part in a report."""
        self._store.set("alarm", "")
        mine = self._activity.state()
        self._store.set(f"state/{self._rank}", pickle.dumps(mine).hex())
        answered = self._await("state", self._others)
        texts = self._store.multi_get([f"state/{rank}" for rank in answered]) if answered else []
        states = {rank: pickle.loads(bytes.fromhex(text.decode())) for rank, text in zip(answered, texts, strict=True)}
        self._states = {rank: states[rank] if rank in states else self._look(rank)[1] for rank in self._others}
        self.lost = frozenset(self._others - states.keys())
        if self._ends:
            print(f"shardlib: {self._text(mine)}", file=sys.stderr, flush=True)
        self._store.set(f"said/{self._rank}", "")
        self._await("said", {rank for rank, state in states.items() if not state.ended})

    def _await(self, what: str, ranks: Collection[int]) -> list[int]:
        """Wait until these ranks have written something, except for those that will not; returns the ranks that have."""
        missing, gone = set(ranks), set[int]()
        until = time.monotonic() + _ANSWER
        while missing - gone and time.monotonic() < until:
            if self._store.check([f"{what}/{rank}" for rank in missing]):
                return list(ranks)
            # Looked at before the store: what a process wrote before it ended is there once it is known to have ended.
            gone = {rank for rank in missing if self._look(rank)[0]}
            missing = {rank for rank in missing if not self._store.check([f"{what}/{rank}"])}
            if missing - gone:
                time.sleep(_CLOSE + len(missing) / 1000)  # all ranks ask the same store
        return [rank for rank in ranks if rank not in missing]

    def _look(self, rank: int) -> tuple[bool, str]:
        """See `vitals.look`."""
        key = f"process/{rank}"
        if rank not in self._identities:
            if not self._store.check([key]):
                return False, "it keeps no watch of this run"
            self._identities[rank] = self._store.get(key).decode()
        return vitals.look(self._identities[rank])

    def _text(self, mine: activity.State, why: str = "") -> str:
        return on_rank(self._rank, {**self._states, self._rank: mine}, why)

    def _wait_for_the_end(self) -> None:
        """End the process unless its program ends by itself, or is given the report and may take its time."""
        if not self._over.wait(_GRACE) and not self._raises:
            print(f"shardlib: rank {self._rank} is ended with exit code {EXIT_HUNG}", file=sys.stderr, flush=True)
            os._exit(EXIT_HUNG)


def _reason(error: BaseException) -> str:
    """The first line of an error; of NCCL's, whose first line names no cause, its last error too."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    causes = [line for before, line in pairwise(lines) if before.startswith("Last error")]
    return ": ".join([*lines[:1], *causes])

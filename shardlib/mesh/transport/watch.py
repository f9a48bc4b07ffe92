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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

from shardlib.common._compat import clone_store, default_store
from shardlib.errors import listing
from shardlib.mesh.transport import activity
from shardlib.mesh.transport.activity import CollectiveCall, State

# Whether a process of this host lives, for reports about ranks that do not answer.


_NOTHING = "it gives no sign of life"


def identity() -> str:
    """This process's host, process id and start, by which other processes of the host find it; "" where that is not
    known."""
    try:
        started = _fields(os.getpid())[19]
        return " ".join((_host(), str(os.getpid()), started))
    except OSError:
        return ""


def look(identity: str) -> tuple[bool, str]:
    """Whether it is certain that a process will not answer, and what is known of it.

    Args:
        identity: the process's `identity`; of another host's process nothing is known.
    """
    host, pid, started = identity.split() if identity else ("", "", "")
    if not host or host != _host():
        return False, _NOTHING
    try:
        state, *_ = fields = _fields(int(pid))
    except OSError:
        return True, f"its process ({pid}) has ended"
    if state in "ZX" or fields[19] != started:
        return True, f"its process ({pid}) has ended"
    if state in "Tt":
        return True, f"its process ({pid}) was stopped by a signal (SIGSTOP) and not continued"
    return False, f"{_NOTHING}, though its process ({pid}) runs"


def _fields(pid: int) -> list[str]:
    """The fields of a process from the third, its state, on: see proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _host() -> str:
    """The kernel's boot and the space of process ids, within which a process id names a process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


# The text of a report on ranks that wait for each other: what each of them does, and who is missing.


# What each rank does; or, of a rank that does not answer, what is known about it.
States = Mapping[int, State | str]


def on_rank(rank: int, states: States, why: str = "") -> str:
    """The report that one rank makes.

    Args:
        rank: the rank, whose own state is known.
        states: what all ranks do.
        why: the transport's words.
    """
    state = states[rank]
    assert isinstance(state, State)
    others = listing(activities(states, leave_out=rank))
    call = state.waits
    if call is None:
        return (
            f"rank {rank} waits in no collective, while other ranks wait{_line('; it runs', state.line)}\n{others}\n"
            "Every rank along an axis must make the same calls."
        )
    missing = _missing(call, states)
    whose = "the ranks" if not missing else "that rank" if len(missing) == 1 else "those ranks"
    return (
        f"{call.what} (size {len(call.members)}) {'failed' if state.failed else 'has not ended'} on rank {rank} "
        f"({call.place}, after {state.seconds:.0f} s): {_who(call, missing, states)}"
        f"{_line('. The program is at', state.line)}\n{others}\nLook at the output of {whose} first; if ranks take "
        f"different branches, make every rank call the same collectives.{why and f' ({why})'}"
    )


def activities(states: States, leave_out: int | None = None) -> list[str]:
    """What each rank does, but for one. Ranks that do the same share an entry."""
    ranks_of: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank != leave_out:
            ranks_of.setdefault(_doing(state, states), []).append(rank)
    return [f"{_ranks(ranks)} {doing if len(ranks) == 1 else _of_several(doing)}" for doing, ranks in ranks_of.items()]


def _doing(state: State | str, states: States) -> str:
    if isinstance(state, str):
        return f"no longer answers: {state}"
    if state.ended:
        return state.ended
    call = state.waits
    if call is not None:
        missing = _missing(call, states)
        return (
            f"waits in {call.what} ({call.place}){f' for {_ranks(missing)}' * bool(missing)}{_line(', at', state.line)}"
        )
    last = ", ".join(f"{call.what} ({call.place})" for call in state.last) or "none"
    return f"waits in no collective (its last: {last}){_line('; it runs', state.line)}"


def _missing(call: CollectiveCall, states: States) -> list[int]:
    """The ranks that have not made a call, as far as is known."""
    known = [member for member in call.members if member in states]
    return [member for member in known if not _made(call, states[member])]


def _made(call: CollectiveCall, state: State | str) -> bool:
    return isinstance(state, State) and not state.ended and any(call.joined_by(last) for last in state.last)


def _who(call: CollectiveCall, missing: Sequence[int], states: States) -> str:
    """Why a call does not end."""
    if not missing:
        return _differences(call, states) or "every rank still answers, and has made this call"
    said: dict[str, list[int]] = {}
    for member in missing:
        state = states[member]
        what = (
            "no longer answers" if isinstance(state, str) else "has ended" if state.ended else "has not made this call"
        )
        said.setdefault(what, []).append(member)
    return "; ".join(
        f"{_ranks(ranks)} {what if len(ranks) == 1 else _of_several(what)}" for what, ranks in said.items()
    )


def _differences(call: CollectiveCall, states: States) -> str:
    """How the members' calls of the same number differ; "" if they are equal."""
    made = {}
    for member in call.members:
        state = states.get(member)
        # A rank may have started others after the one that it waits in.
        for each in (*state.last, state.waits) if isinstance(state, State) else ():
            if each is not None and call.joined_by(each) and each.number == call.number:
                made[member] = each.what
    if len(set(made.values())) < 2:
        return ""
    return f"the ranks' calls differ: {'; '.join(f'rank {member} calls {what}' for member, what in made.items())}"


def _of_several(doing: str) -> str:
    """What several ranks do: the verb, which comes first, in the plural."""
    for one, several in (("waits", "wait"), ("has ", "have "), ("no longer answers", "no longer answer")):
        doing = several + doing.removeprefix(one) if doing.startswith(one) else doing
    return doing


def _line(lead: str, line: str) -> str:
    """A line of code with what leads to it; nothing without the line."""
    return line and f"{lead}\n{line}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


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

    store: dist.Store

    def __init__(self, store: dist.Store, ends: bool, timeout: float | None) -> None:
        self.store, self._ends, self._timeout = store, ends, timeout
        # torchrun's store outlives restarts. `meet` gives each start a part of it; a user's start may use it as it is.
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
        self._store.set(f"process/{self._rank}", identity())
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
        return look(self._identities[rank])

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

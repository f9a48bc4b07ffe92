"""`launch`: one process per rank, watched by this one.

Each rank has a connection to this process, over which it sends its result, and two pipes for its output, each read by a
thread. The pickled function lies in a file without a name. So nothing is left behind, in whichever way this process ends:
the ranks end with it (`orphans.py`), and a file without a name is removed with the last process that has it open.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from subprocess import PIPE
from typing import IO, Any, TextIO, TypeVar, TypeVarTuple

import cloudpickle
import torch.distributed as dist

from shardlib.common.environment import settle
from shardlib.common.systems import LINUX, MACOS, require_system
from shardlib.errors import RankFailure
from shardlib.mesh.launch import supervised
from shardlib.mesh.launch.orphans import end_with
from shardlib.mesh.mesh import Mesh, check_shape, make_mesh
from shardlib.mesh.transport.activity import CollectiveCall, State, here
from shardlib.mesh.transport.watch import activities

_CHILD = (
    "import json, sys; sys.path[:] = dict.fromkeys([*json.loads(sys.argv[1]), *sys.path]); "
    "from shardlib.mesh.launch.processes import run_rank; run_rank(*map(int, sys.argv[2:]))"
)
_PRINTING = threading.Lock()
_TAIL = 15  # lines of a rank's output that a report shows
_LOOK = 0.02  # seconds between two looks at the ranks
_GRACE = 0.3  # seconds to wait, after a failure, for the failures of other ranks, and for their answers
_ASK = 1.0  # seconds between two questions to running ranks while another has returned
_TEAR_DOWN = 30.0  # seconds that ranks have to end by themselves once all have returned
_STUCK = 10  # equal answers in a row after which a rank counts as stuck


Ts = TypeVarTuple("Ts")
R = TypeVar("R")


def launch(fn: Callable[[Mesh, *Ts], R], *args: *Ts, mesh: Mapping[str, int], timeout: float = 600.0) -> list[R]:
    """Run ``fn(mesh, *args)`` in one real process per rank; returns the ranks' values in rank order.

    Functions defined in a notebook work (cloudpickle). Each process computes with its share of the cores unless
    OMP_NUM_THREADS is set. The ranks' output goes to this process's ``sys.stdout`` and ``sys.stderr``, line by line and
    unchanged, as with torchrun. The ranks end when this process ends, and on Ctrl-C.

    Args:
        mesh: axis name -> size.
        timeout: seconds for the whole run, and for each collective.

    Raises:
        UnsupportedError: on Windows; `simulate` runs there.
        RankFailure: a rank raised, died, ran out of time, or returned while others wait for it. The message names the rank,
            with its traceback or the end of its output. The other ranks are stopped.

    >>> sl.launch(lambda mesh, n: n * mesh.coords["data"], 10, mesh=dict(data=2), timeout=600)
    [0, 10]
    """
    require_system("sl.launch", LINUX, MACOS)
    shape = check_shape(mesh)
    ranks = math.prod(shape.values())
    # This process hosts the store by which the ranks find each other, so that a rank which hosted it need not outlive others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryFile(prefix="shardlib-") as job:
        job.write(cloudpickle.dumps((fn, args, shape, timeout)))
        job.flush()
        started: list[_Rank] = []
        try:
            for number in range(ranks):
                started.append(_Rank(number, ranks, job.fileno(), store.port))
            _watch(started, timeout)
        finally:
            for rank in started:
                rank.stop()
    return [cloudpickle.loads(rank.value) for rank in started]


class _Rank:
    """One rank's process, and what this process knows of it.

    Attributes:
        value: the function's pickled value; None before it has returned.
        state: the rank's last answer to the question what it does.
        same: how many answers in a row have named the same call, in which the rank waits.
    """

    def __init__(self, rank: int, ranks: int, job: int, port: int) -> None:
        self.rank = rank
        self.value: Any = None
        self.state: State | str = "it has not said what it does"
        self.same = 0
        self._error: tuple[float, str] | None = None
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._connection, end = Pipe()
        with end:
            command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), *map(str, (job, end.fileno(), os.getpid()))]
            files: Any = {"stdout": PIPE, "stderr": PIPE, "pass_fds": (job, end.fileno())}
            self._process = start_rank(command, rank, ranks, port, {}, **files)
        reads: list[tuple[Callable[..., None], Any]] = [
            (self._listen, ()),
            (_copy, (self._process.stdout, lambda: sys.stdout, self._lines)),
            (_copy, (self._process.stderr, lambda: sys.stderr, self._lines)),
        ]
        self._readers = [threading.Thread(target=target, args=args, daemon=True) for target, args in reads]
        for reader in self._readers:
            reader.start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended; what it has sent and printed is then read."""
        if self._process.poll() is None:
            return False
        self._join()
        return True

    @property
    def wait(self) -> CollectiveCall | None:
        """The call that the rank waits in, by its last answer."""
        return self.state.waits if isinstance(self.state, State) else None

    @property
    def failure(self) -> tuple[float, str] | None:
        """The time and a description of the rank's failure; None without one."""
        code = self._process.returncode if self.ended else None
        if self._error is not None or code is None or (code == 0 and self.value is not None):
            return self._error
        if code == 0:
            how = "ended before the function returned, with exit code 0 (os._exit, or a library that ends the process)"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return 0.0, f"rank {self.rank} {how}. Its last output:\n{self.tail}"

    @property
    def tail(self) -> str:
        """The last lines of the rank's output."""
        return "\n".join(self._lines) or "(no output)"

    def say(self, message: str) -> None:
        """Send "ask" or "done" to the rank, unless it has ended."""
        with suppress(OSError):
            self._connection.send(message)

    def stop(self) -> None:
        """Kill the process and its children, and read the rest of its output."""
        kill_rank(self._process)
        self._join()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(_GRACE)  # a process that the rank started may still have its output open

    def _listen(self) -> None:
        """Take the rank's messages until it has ended."""
        with self._connection, suppress(EOFError, OSError):
            while True:
                kind, content = self._connection.recv()
                if kind == "returned":
                    self.value = content
                elif kind == "raised":
                    at, text = content
                    self._error = at, f"rank {self.rank} raised:\n{text}"
                else:
                    before, self.state = self.wait, content
                    self.same = self.same + 1 if self.wait == before else 1


def _copy(pipe: IO[bytes], out: Callable[[], TextIO], lines: deque[str]) -> None:
    """Write a rank's output, line by line, to this process's stream ``out()``, and keep its last ``lines``."""
    with io.TextIOWrapper(pipe, "utf-8", "replace", newline="\n") as text:
        for line in text:
            with _PRINTING:
                lines.append(line.removesuffix("\n"))
                out().write(f"{lines[-1]}\n")
                out().flush()


def _watch(ranks: list[_Rank], timeout: float) -> None:
    """Return when every rank has returned and ended; raise for the first rank that failed."""
    deadline = time.monotonic() + timeout
    ask = time.monotonic() + _ASK
    while running := _running(ranks):
        if len(running) < len(ranks) and time.monotonic() > ask:
            ask = time.monotonic() + _ASK
            if all(rank.wait and rank.same >= _STUCK for rank in running):
                raise RankFailure(_stuck(ranks, "would have waited for ever"))
            for rank in running:
                rank.say("ask")
        if time.monotonic() > deadline:
            for rank in running:
                rank.say("ask")
            _pass(_GRACE)
            raise RankFailure(
                _stuck(ranks, f"still ran after {timeout:g} s and was stopped; raise timeout= or see what it did")
            )
    for rank in ranks:
        rank.say("done")
    deadline = time.monotonic() + _TEAR_DOWN
    while not all(rank.ended for rank in ranks) and time.monotonic() < deadline:
        _running(ranks)


def _pass(seconds: float) -> None:
    threading.Event().wait(seconds)


def _running(ranks: list[_Rank]) -> list[_Rank]:
    """Wait for a moment, then return the ranks that have not returned. Raises for the first rank that failed."""
    _pass(_LOOK)
    if any(rank.failure for rank in ranks):
        _pass(_GRACE)
        first = min(failure for rank in ranks if (failure := rank.failure) is not None)
        raise RankFailure(f"{first[1]}\n({len(ranks)} ranks; the others were stopped)")
    return [rank for rank in ranks if rank.value is None]


def _stuck(ranks: list[_Rank], what: str) -> str:
    """The message that some ranks are stuck: which, and what every running rank last answered."""
    running = [rank for rank in ranks if rank.value is None]
    returned = ", ".join(str(rank.rank) for rank in ranks if rank.value is not None)
    lines = [f"rank {', '.join(str(rank.rank) for rank in running)} of {len(ranks)} {what}."]
    if returned:
        lines.append(f"rank {returned} returned; every rank along an axis must make the same calls.")
    lines += activities({rank.rank: rank.state for rank in running})
    return "\n".join([*lines, f"The last output of rank {running[0].rank}:\n{running[0].tail}"])


# The process of one rank on this host, as `launch` and `shardlib run` start and kill it.


def threads_of(ranks: int) -> str:
    """The threads of each of ``ranks`` processes: OMP_NUM_THREADS where it is set, else their share of the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def start_rank(
    command: Sequence[str], rank: int, ranks: int, port: int, more: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a rank's process as torchrun would, in a session of its own: Ctrl-C reaches only the process that started it.

    Args:
        port: where this process hosts the store by which the ranks find each other.
        more: further variables of the environment.
        options: of `subprocess.Popen`.
    """
    # What a supervisor tells this process is not for the ranks that this process starts.
    inherited = {name: value for name, value in os.environ.items() if name not in supervised.VARIABLES}
    environment = inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for a store that no rank hosts
        "OMP_NUM_THREADS": threads_of(ranks),
        "PYTHONUNBUFFERED": "1",
        **more,
    }
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def kill_rank(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank that still runs, and the processes that it started; returns when the rank is gone."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_rank(job: int, end: int, parent: int) -> None:
    """Run the pickled function in file ``job`` and send its value, or its traceback, over the connection ``end``.

    Args:
        job, end: file descriptors.
        parent: process id of `launch`'s process.
    """
    end_with(parent)
    connection, sending, done = Connection(end), threading.Lock(), threading.Event()

    def say(kind: str, content: Any) -> None:
        with sending:
            connection.send((kind, content))

    def answer() -> None:
        """Tell the parent what this rank does when it asks, and set ``done`` when it says that all ranks have returned."""
        with suppress(EOFError, OSError):
            while True:
                if connection.recv() == "done":
                    done.set()
                else:
                    say("does", here().state())

    threading.Thread(target=answer, daemon=True).start()
    try:
        with mmap.mmap(job, 0, access=mmap.ACCESS_READ) as pickled:
            fn, args, shape, timeout = cloudpickle.loads(pickled)
        mesh = make_mesh(timeout=timeout, **shape)
        settle(mesh=mesh)
        value = cloudpickle.dumps(fn(mesh, *args))
    except BaseException:
        sys.stdout.flush()
        say("raised", (time.time(), traceback.format_exc()))
        # Skip torch's tear-down: it may wait for peers that will never answer.
        os._exit(1)
    sys.stdout.flush()
    say("returned", value)
    done.wait()  # until all ranks have returned: a peer may still receive what this rank sent
    if dist.is_initialized():
        dist.destroy_process_group()

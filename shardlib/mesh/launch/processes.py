"""`launch`: one process per rank, watched by this one.

Each rank has a connection to this process (`shardlib.mesh.launch.connection`), over which it sends its result, and two pipes
for its output. The pickled function lies in a file without a name. So nothing is left behind when this process ends, in
whichever way: the ranks end with it (`shardlib.mesh.launch.orphans`), and a file without a name is removed with the last
process that has it open.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import selectors
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from subprocess import PIPE
from typing import Any, TextIO

import cloudpickle
import torch.distributed as dist

from shardlib.errors import RankFailure
from shardlib.mesh.launch import rank_process
from shardlib.mesh.launch.connection import Connection
from shardlib.mesh.mesh import check_shape
from shardlib.mesh.transport.activity import CollectiveCall, State
from shardlib.mesh.transport.watch import activities

_CHILD = (
    "import json, sys; sys.path[:] = dict.fromkeys([*json.loads(sys.argv[1]), *sys.path]); "
    "from shardlib.mesh.launch.rank import main; main(*map(int, sys.argv[2:]))"
)
_TAIL = 15  # lines of a rank's output that a report shows
_GRACE = 0.3  # seconds to wait, after a failure, for the failures of other ranks, and for their answers
_ASK = 1.0  # seconds between two questions to running ranks while another has returned
_TEAR_DOWN = 30.0  # seconds that ranks have to end by themselves once all have returned
_STUCK = 10  # equal answers in a row after which a rank counts as stuck


def launch(fn: Callable[..., Any], *args: Any, mesh: Mapping[str, int], timeout: float = 600.0) -> list[Any]:
    """Run ``fn(mesh, *args)`` in one real process per rank; returns the ranks' values in rank order.

    Functions defined in a notebook work (cloudpickle). Each process computes with its share of the cores unless
    OMP_NUM_THREADS is set. The ranks' output goes to this process's ``sys.stdout`` and ``sys.stderr``, line by line and
    unchanged, as with torchrun. The ranks end when this process ends, and on Ctrl-C.

    Args:
        mesh: axis name -> size.
        timeout: seconds for the whole run, and for each collective.

    Raises:
        RankFailure: a rank raised, died, ran out of time, or returned while others wait for it. The message names the rank,
            with its traceback or the end of its output. The other ranks are stopped.

    >>> sl.launch(lambda mesh, n: n * mesh.coords["data"], 10, mesh=dict(data=2), timeout=600)
    [0, 10]
    """
    shape = check_shape(mesh)
    ranks = math.prod(shape.values())
    # This process hosts the store by which the ranks find each other, so that a rank which hosted it need not outlive others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryFile(prefix="shardlib-") as job, selectors.DefaultSelector() as events:
        job.write(cloudpickle.dumps((fn, args, shape, timeout)))
        job.flush()
        started: list[_Rank] = []
        try:
            for number in range(ranks):
                started.append(_Rank(number, ranks, job.fileno(), store.port, events))
            _watch(started, events, timeout)
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

    def __init__(self, rank: int, ranks: int, job: int, port: int, events: selectors.BaseSelector) -> None:
        self.rank = rank
        self.value: Any = None
        self.state: State | str = "it has not said what it does"
        self.same = 0
        self._error: tuple[float, str] | None = None
        self._events = events
        end, rank_end = socket.socketpair()
        with rank_end:
            child = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
            self._process = rank_process.start(
                [*child, *map(str, (job, rank_end.fileno(), os.getpid()))],
                rank, ranks, port, {}, stdout=PIPE, stderr=PIPE, pass_fds=(job, rank_end.fileno()),
            )  # fmt: skip
        self._connection = Connection(end)
        self._lines: deque[str] = deque(maxlen=_TAIL)
        end.setblocking(False)
        events.register(end, selectors.EVENT_READ, self._read)
        for pipe, out in ((self._process.stdout, lambda: sys.stdout), (self._process.stderr, lambda: sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            events.register(pipe, selectors.EVENT_READ, _Output(pipe.fileno(), out, self._lines).read)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def wait(self) -> CollectiveCall | None:
        """The call that the rank waits in, by its last answer."""
        return self.state.waits if isinstance(self.state, State) else None

    @property
    def failure(self) -> tuple[float, str] | None:
        """The time and a description of the rank's failure; None without one. Call `drain` first if the process has ended."""
        code = self._process.poll()
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

    def say(self, **message: Any) -> None:
        """Send a message to the rank, unless it has ended."""
        with suppress(OSError):
            self._connection.send(**message)

    def drain(self) -> None:
        """Read what has arrived from a process that has ended."""
        for key in list(self._events.get_map().values()):
            if key.fileobj in (self._connection.socket, self._process.stdout, self._process.stderr):
                _take(self._events, key)

    def stop(self) -> None:
        """Kill the process and its children, and close the files to it."""
        rank_process.kill(self._process)
        self.drain()
        for file in (self._connection.socket, self._process.stdout, self._process.stderr):
            assert file is not None
            file.close()

    def _read(self) -> bool:
        messages = self._connection.receive()
        for message in messages or ():
            if "returned" in message:
                self.value = message["returned"]
            elif "raised" in message:
                self._error = message["at"], f"rank {self.rank} raised:\n{message['raised']}"
            else:
                before, self.state = self.wait, message["state"]
                self.same = self.same + 1 if self.wait == before else 1
        return messages is not None


class _Output:
    """One of a rank's output streams, whose whole lines are written to this process's stream ``out()``."""

    def __init__(self, pipe: int, out: Callable[[], TextIO], lines: deque[str]) -> None:
        self._pipe, self._out, self._lines = pipe, out, lines
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Write the lines that have arrived; returns False at the end of the stream."""
        try:
            arrived = os.read(self._pipe, 1 << 20)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + self._decoder.decode(arrived)).split("\n")
        if not arrived and self._rest:
            lines, self._rest = [self._rest], ""
        self._lines.extend(lines)
        if lines:
            self._out().write("".join(f"{line}\n" for line in lines))
            self._out().flush()
        return bool(arrived)


def _take(events: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Read from a file that is ready; unregister it at its end."""
    if not key.data():
        events.unregister(key.fileobj)


def _pass(events: selectors.BaseSelector, seconds: float) -> None:
    """Read what arrives within ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in events.select(min(left, 0.02)):
            _take(events, key)


def _watch(ranks: list[_Rank], events: selectors.BaseSelector, timeout: float) -> None:
    """Return when every rank has returned and ended; raise for the first rank that failed."""
    deadline = time.monotonic() + timeout
    ask = time.monotonic() + _ASK
    while running := _running(ranks, events):
        if len(running) < len(ranks) and time.monotonic() > ask:
            ask = time.monotonic() + _ASK
            if all(rank.wait and rank.same >= _STUCK for rank in running):
                raise RankFailure(_stuck(ranks, "would have waited for ever"))
            for rank in running:
                rank.say(ask=True)
        if time.monotonic() > deadline:
            for rank in running:
                rank.say(ask=True)
            _pass(events, _GRACE)
            raise RankFailure(
                _stuck(ranks, f"still ran after {timeout:g} s and was stopped; raise timeout= or see what it did")
            )
    for rank in ranks:
        rank.say(done=True)
    deadline = time.monotonic() + _TEAR_DOWN
    while not all(rank.ended for rank in ranks) and time.monotonic() < deadline:
        _running(ranks, events)


def _running(ranks: list[_Rank], events: selectors.BaseSelector) -> list[_Rank]:
    """Read for a moment, then return the ranks that have not returned. Raises for the first rank that failed."""
    _pass(events, 0.02)
    for rank in ranks:
        if rank.ended:
            rank.drain()
    if any(rank.failure for rank in ranks):
        _pass(events, _GRACE)
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

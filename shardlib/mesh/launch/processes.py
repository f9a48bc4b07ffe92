"""`launch`: one process per rank, watched by this one.

Each rank has a line to this process (`shardlib.mesh.launch.line`) for what became of it, and two pipes for what it
prints. What it is to run lies in a file without a name. So when this process ends, however it ends, nothing is left
behind: the ranks end with it (`shardlib.mesh.launch.orphans`), and files without names go with the last who has them open.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

import cloudpickle
import torch.distributed as dist

from shardlib.errors import RankFailure
from shardlib.mesh.launch.line import Line
from shardlib.mesh.mesh import check_shape

_CHILD = (
    "import json, sys; sys.path[:] = dict.fromkeys([*json.loads(sys.argv[1]), *sys.path]); "
    "from shardlib.mesh.launch.rank import main; main(*map(int, sys.argv[2:]))"
)
_TAIL = 15  # lines of a rank's output that a report shows
_GRACE = 0.3  # seconds in which other ranks may fail in their turn, and in which they are to say what they do
_ASK = 1.0  # seconds between two questions to ranks that run while another has returned
_TEAR_DOWN = 30.0  # seconds in which ranks that have all returned are to end by themselves
_STUCK = 10  # answers in a row by which nothing moves


def launch(fn: Callable[..., Any], *args: Any, mesh: Mapping[str, int], timeout: float = 600.0) -> list[Any]:
    """Run ``fn(mesh, *args)`` in one real process per rank; returns the ranks' values in rank order.

    Functions defined in a notebook work (cloudpickle). Each process computes with its share of the cores
    unless OMP_NUM_THREADS says otherwise. What ranks print comes out here, to ``sys.stdout`` and ``sys.stderr``, line by
    line and as it is, as torchrun has it. The ranks end with this process, and with Ctrl-C.

    Args:
        mesh: axis name -> size.
        timeout: seconds for the whole run, and for each collective.

    Raises:
        RankFailure: a rank raised, died, ran out of time or has returned while others wait for it; names it, with its
            traceback or the end of its output. The other ranks are stopped.

    >>> sl.launch(lambda mesh, n: n * mesh.coords["data"], 10, mesh=dict(data=2), timeout=600)
    [0, 10]
    """
    shape = check_shape(mesh)
    ranks = math.prod(shape.values())
    # The store that ranks find each other by is here: a rank that has returned is not needed for it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryFile(prefix="shardlib-") as job, selectors.DefaultSelector() as events:
        job.write(cloudpickle.dumps((fn, args, shape, timeout)))
        job.flush()
        started: list[_Rank] = []
        try:
            for rank in range(ranks):
                started.append(_Rank(rank, ranks, job.fileno(), store.port, events))
            _watch(started, events, timeout)
        finally:
            for one in started:
                one.stop()
    return [cloudpickle.loads(one.value) for one in started]


class _Rank:
    """One process, and what is known of it.

    Attributes:
        value: what the function returned, pickled; None before.
        does, wait: what it last said that it does, and the number and the name of the call that it waits in.
        same: how often in a row it said so.
    """

    def __init__(self, rank: int, ranks: int, job: int, port: int, events: selectors.BaseSelector) -> None:
        self.rank = rank
        self.value: Any = None
        self.does, self.same = "did not say what it does", 0
        self.wait: tuple[int, str] | None = None
        self._error: tuple[float, str] | None = None
        self._events = events
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for a store that no rank is the host of
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
            "PYTHONUNBUFFERED": "1",
        }
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(sys.path), *map(str, (job, theirs.fileno(), os.getpid()))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job, theirs.fileno()),
                start_new_session=True,  # Ctrl-C is for this process, which stops them with all that they started
            )
        self._line = Line(ours)
        self._lines: deque[str] = deque(maxlen=_TAIL)
        ours.setblocking(False)
        events.register(ours, selectors.EVENT_READ, self._read)
        for pipe, out in ((self._process.stdout, lambda: sys.stdout), (self._process.stderr, lambda: sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            events.register(pipe, selectors.EVENT_READ, _Output(pipe.fileno(), out, self._lines).read)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def failure(self) -> tuple[float, str] | None:
        """When and how it failed, if it did; call `drain` before, once it has ended."""
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
        """The last lines it printed."""
        return "\n".join(self._lines) or "(no output)"

    def say(self, **message: Any) -> None:
        """Tell the rank, unless it is gone."""
        with suppress(OSError):
            self._line.send(**message)

    def drain(self) -> None:
        """Take what has arrived from a process that has ended."""
        for key in list(self._events.get_map().values()):
            if key.fileobj in (self._line.socket, self._process.stdout, self._process.stderr):
                _take(self._events, key)

    def stop(self) -> None:
        """End the process and what it has started; let go of all that belongs to it."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.drain()
        for file in (self._line.socket, self._process.stdout, self._process.stderr):
            assert file is not None
            file.close()

    def _read(self) -> bool:
        messages = self._line.receive()
        for message in messages or ():
            if "returned" in message:
                self.value = message["returned"]
            elif "raised" in message:
                self._error = message["at"], f"rank {self.rank} raised:\n{message['raised']}"
            else:
                self.same = self.same + 1 if message["wait"] == self.wait else 1
                self.does, self.wait = message["does"], message["wait"]
        return messages is not None


class _Output:
    """One of a rank's output streams: whole lines go on to this process's own."""

    def __init__(self, pipe: int, out: Callable[[], TextIO], lines: deque[str]) -> None:
        self._pipe, self._out, self._lines = pipe, out, lines
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Hand on what has arrived; False at the end, when there is nothing more."""
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
    """Read from what has something; leave out what has come to its end."""
    if not key.data():
        events.unregister(key.fileobj)


def _pass(events: selectors.BaseSelector, seconds: float) -> None:
    """Hand on what arrives within so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in events.select(min(left, 0.02)):
            _take(events, key)


def _watch(ranks: list[_Rank], events: selectors.BaseSelector, timeout: float) -> None:
    """Return when every rank has returned and ended; raise for the first that failed."""
    deadline = time.monotonic() + timeout
    ask = time.monotonic() + _ASK
    while running := _running(ranks, events):
        if len(running) < len(ranks) and time.monotonic() > ask:
            ask = time.monotonic() + _ASK
            if all(one.wait and one.same >= _STUCK for one in running):
                raise RankFailure(_stuck(ranks, "would have waited for ever"))
            for one in running:
                one.say(ask=True)
        if time.monotonic() > deadline:
            for one in running:
                one.say(ask=True)
            _pass(events, _GRACE)
            raise RankFailure(
                _stuck(ranks, f"still ran after {timeout:g} s and was stopped; raise timeout= or see what it did")
            )
    for one in ranks:
        one.say(done=True)
    deadline = time.monotonic() + _TEAR_DOWN
    while not all(one.ended for one in ranks) and time.monotonic() < deadline:
        _running(ranks, events)


def _running(ranks: list[_Rank], events: selectors.BaseSelector) -> list[_Rank]:
    """After a moment, those that have not returned. Raises for the first that failed."""
    _pass(events, 0.02)
    for one in ranks:
        if one.ended:
            one.drain()
    if any(one.failure for one in ranks):
        _pass(events, _GRACE)
        first = min(failure for one in ranks if (failure := one.failure) is not None)
        raise RankFailure(f"{first[1]}\n({len(ranks)} ranks; the others were stopped)")
    return [one for one in ranks if one.value is None]


def _stuck(ranks: list[_Rank], what: str) -> str:
    """What every rank did when it was too late."""
    running = [one for one in ranks if one.value is None]
    returned = ", ".join(str(one.rank) for one in ranks if one.value is not None)
    told = [f"rank {', '.join(str(one.rank) for one in running)} of {len(ranks)} {what}."]
    if returned:
        told.append(f"rank {returned} returned; every rank along an axis must make the same calls.")
    told += [f"rank {one.rank} {one.does}" for one in running]
    return "\n".join([*told, f"The last output of rank {running[0].rank}:\n{running[0].tail}"])

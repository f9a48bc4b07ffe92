"""The scheduler of simulated ranks: one thread per rank in this process, one of them running at a time.

A rank runs until it must wait for a collective, then hands over to the next rank that can go on, in rank order. So a
simulation is deterministic. Since the simulator sees every rank, ranks that wait for each other for ever raise an error at
once.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.common._compat import forward_level, no_modes
from shardlib.common.tensors import dtype_name
from shardlib.errors import HandleError, MeshError, RankMismatch, listing
from shardlib.mesh.transport.activity import here
from shardlib.mesh.transport.base import Splits, Work

_PATIENCE = 2.0  # seconds that interrupted ranks have to reach a collective, and then again to be stopped elsewhere
_GLANCE = 0.1  # longest wait in seconds, since a signal that comes just before a wait begins does not end the wait


class Stopped(BaseException):
    """Ends a rank whose simulation is over. Not an `Exception`, so that a rank which catches exceptions ends too."""


class _RankThread(threading.Thread):
    """The thread of one rank. ``simulation`` lets a simulation that the rank starts find the outer one."""

    def __init__(self, simulation: Simulation, target: Callable[[int], None], rank: int) -> None:
        super().__init__(target=target, args=(rank,), name=f"simulated rank {rank}", daemon=True)
        self.simulation, self.rank = simulation, rank
        self.ended = threading.Event()  # `join` and `is_alive` are wrong after an interrupt during `join`

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.ended.set()


class Simulation:
    """Runs ``ranks`` threads by turns and detects deadlock.

    All threads share torch's default generator. So that each rank draws as a process would, every rank starts from the
    generator's present state, and gets its own state back whenever it goes on. After the run the generator has rank 0's
    state.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._wake = [threading.Semaphore(0) for _ in range(ranks)]
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._finished: set[int] = set()
        self._around: Simulation | None = getattr(threading.current_thread(), "simulation", None)
        self._level = forward_level()  # of forward mode, around all ranks
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one body per rank to the end; returns their values, or raises the first failure.

        An interrupt of this thread (Ctrl-C, a notebook's stop button) stops the ranks before it is raised: see `_interrupt`.
        """
        results: list[Any] = [None] * self.ranks
        state = torch.default_generator.get_state()
        ends = [state] * self.ranks

        def main(rank: int) -> None:
            self._wake[rank].acquire()
            torch.default_generator.set_state(state)
            try:
                if self.failure is None:
                    # Backward then runs in this thread, so that a collective in a backward blocks this rank alone.
                    with torch.autograd.set_multithreading_enabled(False):
                        results[rank] = bodies[rank]()
            except BaseException as error:
                self.fail(rank, error)
            ends[rank] = torch.default_generator.get_state()
            self._finished.add(rank)
            self._hand_over(rank)

        threads = [_RankThread(self, main, rank) for rank in range(self.ranks)]
        self._waiting = {rank: (lambda: True, "start") for rank in range(1, self.ranks)}
        begun = False
        try:
            for thread in threads:
                thread.start()
            self._wake[0].release()
            begun = True
            for thread in threads:
                while not thread.ended.wait(_GLANCE):
                    pass
        except BaseException as error:
            self.fail(None, error)
            if not begun:
                self._wake[0].release()
            self._interrupt(threads, error)
        for thread in threads:
            if thread.ended.is_set():
                thread.join()
        torch.default_generator.set_state(ends[0])
        if self.failure is not None:
            if self.failed_rank is not None:
                self.failure.add_note(f"raised on simulated rank {self.failed_rank} of {self.ranks}")
            raise self.failure
        return results

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Record the first failure, of a rank or (None) from outside. Every other rank stops when it next runs."""
        if self.failure is None:
            self.failure, self.failed_rank = error, rank

    def block(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Return once ``ready()`` is true; other ranks run meanwhile. ``what`` names the call, for messages.

        Raises:
            MeshError: the simulation has ended.
        """
        if len(self._finished) == self.ranks:
            raise MeshError(
                f"{what} is called when the simulation of its ranks has ended. Do in the function that sl.simulate runs what "
                "needs all ranks, and return its result: sl.unshard(state.params), an evaluation, a saved checkpoint"
            )
        if not self._over():
            if ready():
                return
            if forward_level() != self._level:
                raise HandleError(
                    f"forward mode (torch.func.jvp, jacfwd) around an exchange of simulated ranks, {what}, which are threads "
                    "of one process. Use reverse mode (torch.func.vjp, jacrev), or sl.launch"
                )
            self._waiting[rank] = (ready, what)
            state = torch.default_generator.get_state()
            if self._hand_over(rank):
                self._wake[rank].acquire()
                torch.default_generator.set_state(state)
        if self._over():
            why = "it was interrupted" if self.failed_rank is None else f"rank {self.failed_rank} failed"
            raise Stopped(f"rank {rank} stopped in {what}, because {why}")

    def _over(self) -> bool:
        """Whether this simulation, or one that it runs inside, has failed."""
        if self.failure is None and self._around is not None and self._around._over():
            self.fail(None, Stopped("the simulation around this one is over"))
        return self.failure is not None

    def _hand_over(self, rank: int) -> bool:
        """Wake the next rank that can run; False when that is ``rank`` itself (it keeps running)."""
        order = [(rank + step) % self.ranks for step in range(1, self.ranks + 1)]
        runnable = [
            other
            for other in order
            if other in self._waiting and (self.failure is not None or self._waiting[other][0]())
        ]
        if not runnable and self._waiting:
            waits = "; ".join(f"rank {other} waits in {self._waiting[other][1]}" for other in sorted(self._waiting))
            done = ", ".join(map(str, sorted(self._finished)))
            self.fail(
                min(self._waiting),
                RankMismatch(
                    f"the ranks wait for each other for ever: {waits}"
                    + (f"; rank {done} has finished" if done else "")
                    + ". Every rank along an axis must make the same collective calls in the same order."
                ),
            )
            runnable = [other for other in order if other in self._waiting]
        if not runnable:
            return True
        chosen = runnable[0]
        del self._waiting[chosen]
        if chosen == rank:
            return False
        self._wake[chosen].release()
        return True

    def _interrupt(self, threads: Sequence[_RankThread], error: BaseException) -> None:
        """Wait for the ranks to end after an interrupt. A second interrupt ends the waiting.

        A rank stops at its next collective. A rank that reaches none within two seconds is stopped between two Python
        instructions, as by Ctrl-C. A rank inside one long operation goes on until the operation ends; a note on ``error``
        names it.
        """
        started = [thread for thread in threads if thread.ident is not None]  # an interrupt may come before all have
        try:
            _await(started)
            for thread in self._computing(started):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
            _await(started)
        except KeyboardInterrupt:
            pass
        busy = self._computing(started)
        for rank in list(self._waiting):  # no rank will hand over to them
            del self._waiting[rank]
            self._wake[rank].release()
        _await([thread for thread in started if thread not in busy])
        for thread in busy:
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame, 1) if frame else []).strip()
            error.add_note(
                f"{thread.name} still computes, and ends at its next collective or with the process:\n{where}"
            )

    def _computing(self, threads: Sequence[_RankThread]) -> list[_RankThread]:
        """The ranks that have not ended and do not wait."""
        return [thread for thread in threads if not thread.ended.is_set() and thread.rank not in self._waiting]


def _await(threads: Sequence[_RankThread]) -> None:
    """Wait for threads to end, at most `_PATIENCE` seconds."""
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        while not thread.ended.wait(_GLANCE) and time.monotonic() < deadline:
            pass


# Collectives between the ranks of a `Simulation`, computed for all ranks by the last one to call.
# Since the simulator sees every rank, two ranks that call different collectives raise at once an error that names both.


@dataclass
class _Round:
    """One collective of a group: the first rank to call, its call's signature and names, and what each member gave."""

    signature: str
    first: int
    label: str
    members: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    complete: bool = False


class _GroupCalls:
    """The calls made so far on one group, shared by its members."""

    def __init__(self) -> None:
        self.rounds: dict[int, _Round] = {}
        # (source, destination, tag) -> messages that were sent and not yet received, oldest first.
        self.boxes: dict[tuple[int, int, int], deque[torch.Tensor]] = {}


class SimulatedGroup:
    """One simulated rank's view of a group.

    Args:
        simulation: the scheduler all ranks share.
        exchange: the group's shared record of calls, from `SimulatedGroup.exchange`.
        members: global ranks of the group, in group order.
        rank: this rank's index among them.
        axis: the mesh axis, for messages.
    """

    exchange = _GroupCalls

    def __init__(
        self, simulation: Simulation, exchange: _GroupCalls, members: Sequence[int], rank: int, axis: str
    ) -> None:
        self.size: int = len(members)
        self.rank = rank
        self._simulation = simulation
        self._exchange = exchange
        self._members = members
        self._axis = axis
        self._calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._post("all_reduce", tensor, tensor, lambda inputs, rank: torch.stack(inputs).sum(0))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._post("all_gather", out, inp, lambda inputs, rank: torch.cat(inputs))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        def chunk(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            return torch.stack([value.chunk(self.size)[rank] for value in inputs]).sum(0)

        return self._post("reduce_scatter", out, inp, chunk)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        if splits is not None:
            return self._uneven(out, inp, splits)

        def chunks(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            return torch.cat([value.chunk(self.size)[rank] for value in inputs])

        return self._post("all_to_all", out, inp, chunks)

    def _uneven(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits) -> Work:
        self._require_contiguous("all_to_all", out, inp)

        def finish(members: dict[int, Any]) -> None:
            self._require_fit([members[rank][2] for rank in range(self.size)])
            with torch.no_grad(), no_modes():
                chunks = [members[rank][0].reshape(-1).split(list(members[rank][2].sent)) for rank in range(self.size)]
                for rank in range(self.size):
                    members[rank][1].view(-1).copy_(torch.cat([sent[rank] for sent in chunks]))

        signature = f"uneven all_to_all({dtype_name(inp.dtype)})"
        return self._call(signature, (inp.detach(), out.detach(), splits), finish)

    def _require_fit(self, splits: list[Splits]) -> None:
        """Fail the simulation where a rank sends another number of elements than the other rank receives."""
        unfit = [
            f"rank {self._members[source]} sends rank {self._members[target]} {splits[source].sent[target]} elements, and "
            f"rank {self._members[target]} receives {splits[target].received[source]}"
            for source in range(self.size)
            for target in range(self.size)
            if splits[source].sent[target] != splits[target].received[source]
        ]
        if unfit:
            me = self._members[self.rank]
            error = RankMismatch(f"splits of an all_to_all on axis {self._axis!r} do not fit: {listing(unfit)}")
            self._simulation.fail(me, error)
            raise error

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._post(f"broadcast from {source}", tensor, tensor, lambda inputs, rank: inputs[source])

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        def move(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            sources = [source for source, destination in pairs if destination == rank]
            return inputs[sources[0]] if sources else torch.zeros_like(inputs[rank])

        return self._post(f"permute {tuple(pairs)}", out, inp, move)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self._require_contiguous("send", tensor)
        box = self._exchange.boxes.setdefault((self.rank, peer, tag), deque())
        box.append(tensor.detach().clone())
        return Work()

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        self._require_contiguous("recv", out)
        box = self._exchange.boxes.setdefault((peer, self.rank, tag), deque())
        me, target = self._members[self.rank], out.detach()
        what = (
            f"recv({out.numel()} × {dtype_name(out.dtype)}) from rank {self._members[peer]} "
            f"on axis {self._axis!r} (tag {tag}{here().label})"
        )

        def finish() -> None:
            self._simulation.block(me, lambda: bool(box), what)
            sent = box.popleft()
            if sent.numel() != target.numel() or sent.dtype is not target.dtype:
                error = RankMismatch(
                    f"rank {me} waits in {what}, and {sent.numel()} × {dtype_name(sent.dtype)} were sent. "
                    "Send and receive the same number of elements, of the same dtype."
                )
                self._simulation.fail(me, error)
                raise error
            with torch.no_grad():
                target.copy_(sent.view_as(target))

        return Work(finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        got: list[Any] = []

        def finish(members: dict[int, Any]) -> None:
            values = [members[rank][0] for rank in range(self.size)]
            for rank in range(self.size):
                members[rank][1].extend(values)

        self._call("all_gather_object", (value, got), finish).wait()
        return got

    def _post(
        self,
        name: str,
        out: torch.Tensor,
        inp: torch.Tensor,
        result: Callable[[list[torch.Tensor], int], torch.Tensor],
    ) -> Work:
        self._require_contiguous(name, out, inp)
        signature = f"{name}({inp.numel()} × {dtype_name(inp.dtype)})"

        def finish(members: dict[int, Any]) -> None:
            # The last rank to call computes for all ranks, which its dispatch modes (a recompute policy) must not see.
            with torch.no_grad(), no_modes():
                inputs = [members[rank][0].reshape(-1) for rank in range(self.size)]
                # All results are computed before any is written: all_reduce and broadcast write over their inputs.
                results = [result(inputs, rank) for rank in range(self.size)]
                for rank, value in enumerate(results):
                    members[rank][1].copy_(value.view_as(members[rank][1]))

        return self._call(signature, (inp.detach(), out.detach()), finish)

    def _require_contiguous(self, name: str, *buffers: torch.Tensor) -> None:
        """Refuse what ranks in processes of their own cannot exchange."""
        for buffer in buffers:
            if not buffer.is_contiguous():
                raise ValueError(
                    f"{name} on axis {self._axis!r}: {tuple(buffer.shape)} with strides {buffer.stride()} is not contiguous. "
                    "Processes do not exchange it: give tensor.contiguous()"
                )

    def _call(self, signature: str, entry: tuple[Any, ...], finish: Callable[[dict[int, Any]], None]) -> Work:
        number = self._calls
        self._calls += 1
        me = self._members[self.rank]
        label = here().label
        current = self._exchange.rounds.setdefault(number, _Round(signature, me, label))
        if current.signature != signature:
            error = RankMismatch(
                f"ranks call different collectives on axis {self._axis!r} (call {number + 1}): "
                f"rank {current.first} calls {current.signature}{current.label}; rank {me} calls {signature}{label}. "
                "Every rank along an axis must make the same calls, of the same sizes, in the same order."
            )
            self._simulation.fail(me, error)
            raise error
        current.members[self.rank] = entry
        if len(current.members) == self.size:
            finish(current.members)
            current.complete = True
            current.members = {}
            del self._exchange.rounds[number]
        what = f"{signature} on axis {self._axis!r} (call {number + 1}{here().label})"
        return Work(lambda: self._simulation.block(me, lambda: current.complete, what))

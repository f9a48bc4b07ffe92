"""Real processes: how they find each other, after a restart too, and the transport between them: torch.distributed, with the
fastest algorithm known for each backend.

gloo's (CPU) own single-tensor all-gather and reduce-scatter are several times slower than the messages that they need (64 MB,
2 ranks, 2 cores: all-gather 67 ms, as sends and receives 24 ms; reduce-scatter 80 ms, as an all-to-all and a sum 48 ms). Its
all-to-all does not use both directions of a link at once (four of 4 MB between 2 hosts at 100 Mbit/s: 2.4 s, as messages
1.6 s). So on gloo all three are made of tagged point-to-point messages. Sums run in rank order, so that they do not depend on
timing. Other backends (NCCL) use their own collectives.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlib.common import _compat
from shardlib.common._compat import storage_id
from shardlib.errors import RankFailure
from shardlib.mesh.transport import activity, watch
from shardlib.mesh.transport.activity import CollectiveCall, Series
from shardlib.mesh.transport.base import Splits, Work

_POLL = 0.02  # seconds between rank 0's looks for ranks that ask
_AFTER_THE_WATCH = timedelta(seconds=60)


def start_processes(device: torch.device, timeout: float) -> None:
    """Start torch.distributed (gloo on CPU, NCCL on CUDA) in the world that the environment names.

    Args:
        timeout: seconds that processes wait for each other, now and in each collective.

    Raises:
        RankFailure: processes of the world have not started in time; names them.
    """
    limit = limit_of(device, timeout)
    world: dict[str, Any] = {}  # what torch reads in the environment itself
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        world = {"store": meet(rank, size, timedelta(seconds=timeout)), "rank": rank, "world_size": size}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, **world)
        watch.begin(ends=True, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=limit, **world)
        watch.begin(ends=True)


def limit_of(device: torch.device, timeout: float) -> timedelta:
    """The timeout of process groups. NCCL ends the process then, in words of its own, so that the watch comes first."""
    limit = timedelta(seconds=timeout)
    return limit + _AFTER_THE_WATCH if device.type == "cuda" else limit


def meet(rank: int, size: int, limit: timedelta) -> dist.Store:
    """The store of this start, over torchrun's, which outlives its processes when it restarts them.

    In torchrun's store the addresses of processes that were killed stay behind, and gloo would connect to those. So every
    start has keys of its own, under a name that rank 0 makes up and gives to each process that asks for it. (torchrun's count
    of restarts would not do: each of several agents counts its own. A key that rank 0 sets would not do either: other ranks
    could read the one of an earlier start.)
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False, limit)
    me = uuid.uuid4().hex
    if rank == 0:
        _answer(store, size, me, limit)
        return dist.PrefixStore(f"shardlib/{me}", store)
    store.set(f"shardlib/asks/{rank}", me)
    try:
        start = store.get(f"shardlib/start of {me}").decode()
    except dist.DistStoreError as error:
        raise RankFailure(
            f"rank 0 has not started within {limit}, and rank {rank} waits for it. Look at the output of rank 0 first"
        ) from error
    store.set(f"shardlib/{start}/has met/{rank}", "")
    return dist.PrefixStore(f"shardlib/{start}", store)


def _answer(store: dist.Store, size: int, start: str, limit: timedelta) -> None:
    """Tell every rank that asks the name of this start, until all have met. (A process may ask that has ended since.)"""
    until = time.monotonic() + limit.total_seconds()
    answered = dict.fromkeys(range(1, size), b"")
    while answered:
        for rank in list(answered):
            if store.check([f"shardlib/{start}/has met/{rank}"]):
                del answered[rank]
            elif store.check([f"shardlib/asks/{rank}"]):
                asker = store.get(f"shardlib/asks/{rank}")
                if asker != answered[rank]:
                    store.set(f"shardlib/start of {asker.decode()}", start)
                    answered[rank] = asker
        if answered and time.monotonic() > until:
            ranks = ", ".join(map(str, answered))
            raise RankFailure(
                f"rank {ranks} of {size} has not started within {limit}, and rank 0 waits for it. Look at the output of "
                "that rank first"
            )
        time.sleep(_POLL)


# A tag has 31 bits. The tags of single messages have the highest bit set. The tag of an exchange is its number (numbers are
# reused after _EXCHANGES) and, in the bits above, a hash of its size.
_EXCHANGES, _SIZES, _SINGLE = 1 << 20, 1021, 1 << 30


class ProcessGroup:
    """The ranks of a torch process group.

    Args:
        group: a torch process group this rank belongs to.
        axis: the mesh axis of these ranks, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str) -> None:
        self.group = group
        self._axis = axis
        self.size: Any = group.size()
        self.rank: Any = group.rank()
        self._gloo = dist.get_backend(group) == "gloo"
        self._number = 0
        self._lanes: list[dist.ProcessGroup] = []
        self._members = tuple(dist.get_process_group_ranks(group))
        self._calls = activity.here().series(axis, self._members)
        self._watch = watch.begin()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._guard("all_reduce", lambda: [dist.all_reduce(tensor, group=self.group, async_op=True)], tensor)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        if not self._gloo:
            return self._guard(
                "all_gather",
                lambda: [_compat.all_gather_single(out, inp, group=self.group, async_op=True)],
                inp,
            )
        chunks = out.view(self.size, -1)

        def start() -> list[Any]:
            works = self._messages(
                {peer: inp.view(-1) for peer in self._peers}, {peer: chunks[peer] for peer in self._peers}
            )
            if chunks[self.rank].data_ptr() != inp.data_ptr():
                chunks[self.rank].copy_(inp.view(-1))
            return works

        return self._guard("all_gather", start, inp)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        if not self._gloo:
            return self._guard(
                "reduce_scatter",
                lambda: [_compat.reduce_scatter_single(out, inp, group=self.group, async_op=True)],
                inp,
            )
        chunks = inp.view(self.size, -1)
        # The chunk that is added last is received where the result will be, unless that is in ``inp``.
        added_last = 0 if self.rank == self.size - 1 else self.size - 1
        apart = storage_id(out.untyped_storage()) != storage_id(inp.untyped_storage())
        received = {
            peer: out.view(-1) if peer == added_last and apart else torch.empty_like(chunks[peer])
            for peer in self._peers
        }

        def start() -> list[Any]:
            return self._messages({peer: chunks[peer] for peer in self._peers}, received)

        def total() -> None:
            ordered = [received.get(rank, chunks[self.rank]) for rank in range(self.size)]
            if out.dtype.itemsize >= 4 or self.size == 2:
                # ``out`` may be one of the summands, so nothing is written to it before that was read.
                *first, last = ordered
                so_far = first[0]
                for chunk in first[1:]:
                    so_far = torch.add(so_far, chunk, out=first[0] if self.rank else first[1])
                torch.add(so_far, last, out=out.view(-1))
            else:
                # torch.sum accumulates 16-bit floats in fp32; more than one addition would round each time.
                torch.sum(torch.stack(ordered), 0, out=out.view(-1))

        return self._guard("reduce_scatter", start, inp, then=total)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        even = [inp.numel() // self.size] * self.size
        sent, received = (even, even) if splits is None else (list(splits.sent), list(splits.received))

        def start() -> list[Any]:
            into, whole = out.view(-1), inp.view(-1)
            if not self._gloo:
                return [dist.all_to_all_single(into, whole, received, sent, group=self.group, async_op=True)]
            leaving, coming = whole.split(sent), into.split(received)
            works = self._messages(
                {peer: leaving[peer] for peer in self._peers if sent[peer]},
                {peer: coming[peer] for peer in self._peers if received[peer]},
            )
            coming[self.rank].copy_(leaving[self.rank])
            return works

        # A report compares the ranks' calls, whose sizes may differ here.
        return self._guard("all_to_all", start, inp, sized=splits is None)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        root = dist.get_global_rank(self.group, source)
        return self._guard("broadcast", lambda: [dist.broadcast(tensor, root, group=self.group, async_op=True)], tensor)

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        targets = [destination for source, destination in pairs if source == self.rank]
        sources = [source for source, destination in pairs if destination == self.rank]

        def start() -> list[Any]:
            if self.rank in targets:
                out.copy_(inp)
            elif not sources:
                out.zero_()
            sends = {peer: inp.view(-1) for peer in targets if peer != self.rank}
            receives = {peer: out.view(-1) for peer in sources if peer != self.rank}
            return self._messages(sends, receives)

        return self._guard("permute", start, inp)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        def start() -> list[Any]:
            return [dist.isend(tensor, group=self._lane(peer > self.rank), group_dst=peer, tag=_SINGLE | tag)]

        return self._guard("send", start, tensor, calls=self._messages_between(self.rank, peer))

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        def start() -> list[Any]:
            return [dist.irecv(out, group=self._lane(peer < self.rank), group_src=peer, tag=_SINGLE | tag)]

        return self._guard("recv", start, out, calls=self._messages_between(peer, self.rank))

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        call = self._calls.call("all_gather_object", None)
        self._wait(call, lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    @property
    def _peers(self) -> list[int]:
        """The other ranks, from the next one on, so that not all ranks send to rank 0 at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _messages(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> list[Any]:
        """Start all messages of a call at once.

        Tags keep the messages of different calls, and of calls of different sizes, from being paired: gloo ends the process
        on a message that is longer than its receive, whereas a message that is never received ends in a timeout, which names
        the call.
        """
        self._number = (self._number + 1) % _EXCHANGES
        if not self._gloo:
            ops = [
                dist.P2POp(op, tensor, group=self.group, group_peer=peer)
                for op, table in ((dist.irecv, receives), (dist.isend, sends))
                for peer, tensor in table.items()
            ]
            return dist.batch_isend_irecv(ops) if ops else []

        def tag(tensor: torch.Tensor) -> int:
            return self._number + tensor.nbytes % _SIZES * _EXCHANGES

        works = [self.group.recv([tensor], peer, tag(tensor)) for peer, tensor in receives.items()]
        return works + [self.group.send([tensor], peer, tag(tensor)) for peer, tensor in sends.items()]

    def _lane(self, upwards: bool) -> dist.ProcessGroup:
        """The torch group for single messages to higher ranks, or to lower ones.

        gloo pairs messages by their tags, and needs one group. NCCL runs the messages between two ranks one after another in
        the order of the calls, and two ranks that both send first would wait for each other. So on NCCL each direction has a
        communicator of its own, which its members make at their first message. (torch names such a group by the number of
        groups that a process is in already, so this number must be the same on all members, as it is along the axes of a
        mesh.)
        """
        if self._gloo:
            return self.group
        if not self._lanes:
            ranks = dist.get_process_group_ranks(self.group)
            self._lanes = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2)]
        return self._lanes[upwards]

    def _messages_between(self, source: int, destination: int) -> Series:
        """The messages from one rank of the group to another."""
        return activity.here().series(self._axis, (self._members[source], self._members[destination]))

    def _guard(
        self,
        op: str,
        start: Callable[[], list[Any]],
        tensor: torch.Tensor,
        then: Callable[[], None] | None = None,
        calls: Series | None = None,
        sized: bool = True,
    ) -> Work:
        call = (calls or self._calls).call(op, tensor if sized else None)
        try:
            works = start()
        except RuntimeError as error:
            activity.here().fail(call)
            raise RankFailure(self._watch.report(error)) from error

        def wait() -> None:
            for work in works:
                work.wait()

        def finish() -> None:
            self._wait(call, wait)
            if tensor.is_cuda and not self._gloo:
                self._follow(call)
            if then is not None:
                then()

        return Work(finish)

    def _wait(self, call: CollectiveCall, wait: Callable[[], None]) -> None:
        """Wait in a call. If it fails, raise a report; all ranks make one."""
        try:
            activity.here().wait(call, wait)
        except RuntimeError as error:
            raise RankFailure(self._watch.report(error)) from error

    @staticmethod
    def _follow(call: CollectiveCall) -> None:
        """Let the watch see when the device's queue is past a call, for which this process does not wait."""
        if not torch.cuda.is_current_stream_capturing():
            event = torch.Event()
            event.record()
            activity.here().follow(call, event.query)

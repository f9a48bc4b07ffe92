"""The start of torch.distributed: how the processes of a run find each other, after a restart too."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlib.errors import RankFailure
from shardlib.mesh.transport import watch

_POLL = 0.02  # seconds between rank 0's looks for ranks that ask
_AFTER_THE_WATCH = timedelta(seconds=60)


def start(device: torch.device, timeout: float) -> None:
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

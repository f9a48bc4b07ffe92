"""Detection of lost ranks: after a failed collective every surviving rank signs a list in the rendezvous store."""

from __future__ import annotations

import time

import torch.distributed as dist

from shardlib._compat import default_store

_GRACE = 3.0  # seconds the survivors wait for each other's signature


def silent_ranks() -> list[int]:
    """The global ranks that do not sign within a few seconds.

    Every rank on which the collective failed calls this. A rank that died, or is stuck elsewhere, does not. When the store
    cannot be reached, rank 0, which hosts it, is lost.
    """
    try:
        store = default_store()
        store.set(_name(dist.get_rank()), "here")
        missing = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        deadline = time.monotonic() + _GRACE
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([_name(rank)])]
            time.sleep(0.05)
        return missing
    except (RuntimeError, ValueError):
        return [0]


def _name(rank: int) -> str:
    return f"shardlib/alive/{rank}"

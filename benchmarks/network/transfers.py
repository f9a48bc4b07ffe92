"""Raw transfers, which measure the speed of a network."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.harness.timing import wall


def transfers(payload: int, rounds: int) -> list[float]:
    """Seconds of each of ``rounds`` raw transfers, in which all ranks send ``payload`` bytes to the next rank at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = torch.ones(payload // 4), torch.empty(payload // 4)

    def exchange() -> None:
        for work in (dist.irecv(into, (rank - 1) % size), dist.isend(out, (rank + 1) % size)):
            work.wait()

    seconds = []
    for _ in range(rounds + 1):  # the first one connects
        dist.barrier()
        seconds.append(wall(exchange))
    return seconds[1:]

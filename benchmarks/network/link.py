"""Steps over a 1 Gbit/s link, one rank on each of two hosts of a network.

A step should take little longer than the larger of its times for computing and for sending.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import interleave
from benchmarks.network.namespaces import NoNetwork, network
from benchmarks.network.transfers import transfers
from benchmarks.peers import ddp, fsdp
from benchmarks.peers.gpt import GPT, SMALL, Config, make_loss, params_of, random_batch
from benchmarks.peers.provider import Provider
from benchmarks.peers.shardlib import shardlib_alone, shardlib_stage

_RATE = "1gbit"
_TARGET = 1.2
_PROBE = 32 << 20  # bytes of the raw transfer
_WARM = 2
_TITLE = "A link of 1 Gbit/s"
_STAGES = {f"shardlib stage {stage}": stage for stage in range(4)} | {"DDP": 0, "fully_shard": 3}


def providers() -> list[Provider]:
    return [*(shardlib_stage(stage) for stage in range(4)), ddp.plain(), fsdp.sharded(True)]


def measure(setting: Setting) -> Result:
    """Per provider: step against max(compute, wire)."""
    try:
        with network(2) as hosts:
            hosts.limit(_RATE)
            answer = json.loads(hosts.run(__name__, str(setting.rounds), *["small"] * setting.small, timeout=1200))
    except NoNetwork as error:
        rows = [Row(p.name, "max(compute, wire)", _TARGET, None, None) for p in providers()]
        return tables.compared(_TITLE, f"Not measured: {error}.", rows, {})
    rate, times = answer["rate"], answer["times"]
    compute = times[shardlib_alone().name]
    rows = []
    for provider in providers():
        name = provider.name
        wire = answer["payload"][_STAGES[name]] / rate
        bound = [max(alone, wire) for alone in compute]
        target = _TARGET if name.startswith("shardlib") else None
        against = f"max(compute {statistics.median(compute):.2f} s, wire {wire:.2f} s)"
        rows.append(tables.paired(name, times[name], against, bound, target))
    about = (
        "The same GPT, one rank per network namespace, joined by a veth pair whose two ends are shaped by tbf to "
        f"{_RATE}; a raw gloo send of {_PROBE >> 20} MB reached {rate * 8 / 1e9:.3f} Gbit/s each way at once. Compute is "
        "`train_step` on a mesh of one, on both ranks at once, a turn of every round; wire is the payload one rank sends "
        "per step at that rate, as planned (for DDP as at stage 0, for fully_shard as at stage 3). "
        f"{setting.rounds} rounds."
    )
    return tables.compared(_TITLE, about, rows, times)


def _rank(rounds: int, small: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = SMALL if small else Config()
    mesh = sl.make_mesh()
    probe = 1 << 16 if small else _PROBE
    rate = probe / statistics.median(transfers(probe, 5))
    steps = {provider.name: provider.make(config) for provider in [*providers(), shardlib_alone()]}
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda number, step=step: step(random_batch(config, number * mesh.size + mesh.rank))
        for name, step in steps.items()
    }
    times = interleave(calls, rounds, warm=_WARM, barrier=dist.barrier)
    return {"rate": rate, "payload": [_payload(config, stage) for stage in range(4)], "times": times}


def _payload(config: Config, stage: int) -> int:
    """The planned bytes that one rank sends per step."""
    params, batch = params_of(GPT(config)), random_batch(config, 0)
    mesh = sl.abstract_mesh(data=2)
    return sl.make_plan(params, mesh, sl.zero(stage), loss_fn=make_loss(config), batch=batch).payload()["data"]


CASE = Case("link", "every provider over one link of 1 Gbit/s; needs root", {CPU: 5}, measure)

if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]), "small" in sys.argv)))

"""Step times of compressed communication on slow networks, with every link at 100 Mbit/s, at 1 Gbit/s and unlimited.

Two hosts on one link, four on a bridge. Needs root and iproute2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave
from benchmarks.network import report
from benchmarks.network.methods import Run, methods
from benchmarks.network.namespaces import Network, NoNetwork, network
from benchmarks.network.report import ALONE, RAW, Sample
from benchmarks.network.transfers import transfers
from benchmarks.peers.gpt import SMALL, Config, random_batch
from benchmarks.peers.shardlib import shardlib_alone

# ranks -> rate of the links -> rounds
_ROUNDS: dict[int, dict[str, int]] = {
    2: {"unlimited": 8, "1gbit": 3, "100mbit": 2},
    4: {"unlimited": 4, "1gbit": 2, "100mbit": 1},
}
_PROBES = {"unlimited": 32 << 20, "1gbit": 32 << 20, "100mbit": 8 << 20}  # bytes of a raw transfer
_WARM = 2


def measure(ranks: int, setting: Setting) -> Result:
    """Times of all methods' steps on ``ranks`` hosts."""
    small = ["small"] * setting.small
    try:
        with network(ranks) as hosts:
            answer = hosts.run(__name__, hosts.name, str(ranks), str(setting.rounds), *small, timeout=900)
    except NoNetwork as error:
        return Result(f"Not measured: {error}.\n", Sample._fields, [], missing=["a network"])
    return report.result([Sample(*fields) for fields in json.loads(answer)])


def _rank(hosts: Network, most: int, small: bool) -> list[Sample]:
    torch.set_num_threads(1)
    world, config = sl.make_mesh(), SMALL if small else Config()
    alone = shardlib_alone().make(config)
    runs = {method.name: Run(method, config, hosts.hosts) for method in methods()}
    steps = {method.name: method.steps for method in methods()} | {ALONE: 1}
    calls: dict[str, Callable[[int], Any]] = {**runs, ALONE: lambda number: alone(random_batch(config, number))}
    for call in calls.values():
        for number in range(_WARM):
            call(number)
    samples = []
    for rate, wanted in _ROUNDS[hosts.hosts].items():
        rounds, probe = min(wanted, most), 1 << 16 if small else _PROBES[rate]
        dist.barrier()
        if world.rank == 0:
            hosts.limit(None if rate == "unlimited" else rate)
            print(f"{hosts.hosts} ranks, {rate}: {rounds} rounds …", file=sys.stderr, flush=True)
        raw = transfers(probe, 3)
        for run in runs.values():
            run.sent()
        times = interleave(calls, rounds, barrier=dist.barrier)
        sent = {name: run.sent() / rounds for name, run in runs.items()} | {ALONE: 0.0}
        samples += [Sample(hosts.hosts, rate, RAW, number, took, probe) for number, took in enumerate(raw)]
        samples += [
            Sample(hosts.hosts, rate, name, number, took / steps[name], sent[name] / steps[name])
            for name in calls
            for number, took in enumerate(times[name])
        ]
    return samples


CASES = tuple(
    Case(
        f"slow_network_{ranks}",
        f"compressed communication between {ranks} hosts on slow links; needs root",
        {CPU: max(_ROUNDS[ranks].values())},
        partial(measure, ranks),
    )
    for ranks in _ROUNDS
)

if __name__ == "__main__":
    name, ranks, rounds = sys.argv[1:4]
    print(json.dumps(_rank(Network(name, int(ranks)), int(rounds), "small" in sys.argv)))

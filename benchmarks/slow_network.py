"""What compressed communication saves on slow networks: ``python -m benchmarks.slow_network [--ranks 2 4]``.

Two hosts on one link, four on a bridge, every link at 100 Mbit/s, 1 Gbit/s and without a limit. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks import slow_report
from benchmarks.model import Config, random_batch
from benchmarks.network import Network, NoNetwork, network
from benchmarks.providers import shardlib_alone
from benchmarks.slow_methods import Run, methods
from benchmarks.slow_report import ALONE, RAW, Sample
from benchmarks.timing import interleave, transfers

# ranks -> rate of the links -> rounds
_ROUNDS: dict[int, dict[str, int]] = {
    2: {"unlimited": 8, "1gbit": 3, "100mbit": 2},
    4: {"unlimited": 4, "1gbit": 2, "100mbit": 1},
}
_PROBES = {"unlimited": 32 << 20, "1gbit": 32 << 20, "100mbit": 8 << 20}  # bytes of a raw transfer
_WARM = 2


def measure(ranks: int) -> list[Sample]:
    """All methods' steps on ``ranks`` hosts.

    Raises:
        NoNetwork: there can be no namespaces here.
    """
    with network(ranks) as hosts:
        answer = hosts.run("benchmarks.slow_network", "--on", hosts.name, "--ranks", str(ranks), timeout=900)
    return [Sample(*fields) for fields in json.loads(answer)]


def _rank(hosts: Network) -> list[Sample]:
    torch.set_num_threads(1)
    world, config = sl.make_mesh(), Config()
    alone = shardlib_alone().make(config)
    runs = {method.name: Run(method, config, hosts.hosts) for method in methods()}
    steps = {method.name: method.steps for method in methods()} | {ALONE: 1}
    calls: dict[str, Callable[[int], Any]] = {**runs, ALONE: lambda number: alone(random_batch(config, number))}
    for call in calls.values():
        for number in range(_WARM):
            call(number)
    samples = []
    for rate, rounds in _ROUNDS[hosts.hosts].items():
        dist.barrier()
        if world.rank == 0:
            hosts.limit(None if rate == "unlimited" else rate)
            print(f"{hosts.hosts} ranks, {rate}: {rounds} rounds …", file=sys.stderr, flush=True)
        raw = transfers(_PROBES[rate], 3)
        for run in runs.values():
            run.sent()
        times = interleave(calls, rounds, dist.barrier)
        sent = {name: run.sent() / rounds for name, run in runs.items()} | {ALONE: 0.0}
        samples += [Sample(hosts.hosts, rate, RAW, number, took, _PROBES[rate]) for number, took in enumerate(raw)]
        samples += [
            Sample(hosts.hosts, rate, name, number, took / steps[name], sent[name] / steps[name])
            for name in calls
            for number, took in enumerate(times[name])
        ]
    return samples


def run(sizes: Sequence[int] = tuple(_ROUNDS)) -> str:
    """Measure on networks of these sizes and write ``results/slow_network``; returns the text."""
    try:
        for ranks in sizes:
            slow_report.keep(ranks, measure(ranks))
    except NoNetwork as error:
        return f"Not measured: {error}."
    return slow_report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", choices=list(_ROUNDS), default=list(_ROUNDS))
    parser.add_argument("--on", help=argparse.SUPPRESS)  # the network that `measure` starts a rank on
    arguments = parser.parse_args()
    if arguments.on:
        print(json.dumps(_rank(Network(arguments.on, *arguments.ranks))))
    else:
        print(run(arguments.ranks))


if __name__ == "__main__":
    main()

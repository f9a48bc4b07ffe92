"""Steps over a 1 Gbit/s link: one rank in each of two network namespaces of our own, joined by a veth pair.

Needs root and iproute2. A step should take little longer than the larger of what it computes and what it sends.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.model import GPT, Config, make_loss, params_of, random_batch
from benchmarks.peers import ddp, fsdp
from benchmarks.provider import ADAMW, Batch, Provider, Step
from benchmarks.providers import shardlib_stage
from benchmarks.report import Row, Section
from benchmarks.timing import interleave, ratio

_SPACES = ("shardbench0", "shardbench1")
_LINKS = ("shardveth0", "shardveth1")
_ADDRESSES = ("192.168.211.1", "192.168.211.2")
_RATE = "1gbit"
_TARGET = 1.2
_PROBE = 32 << 20  # bytes of the raw transfer
_WARM = 2
_TITLE = "A link of 1 Gbit/s"
_COMPUTE = "compute alone"
_STAGES = {f"shardlib stage {stage}": stage for stage in range(4)} | {"DDP": 0, "fully_shard": 3}


def providers() -> list[Provider]:
    return [*(shardlib_stage(stage) for stage in range(4)), ddp.plain(), fsdp.sharded(True)]


def measure(rounds: int) -> Section:
    """Per provider: step against max(compute, wire)."""
    try:
        with _link():
            answer = _ranks(rounds)
    except (OSError, subprocess.CalledProcessError) as error:
        text = f"Not measured: two network namespaces could not be set up here ({type(error).__name__})."
        return Section(_TITLE, text, [Row(p.name, "max(compute, wire)", _TARGET, None, None) for p in providers()])
    rate, times = answer["rate"], answer["times"]
    compute = times[_COMPUTE]
    rows = []
    for provider in providers():
        name = provider.name
        wire = answer["payload"][_STAGES[name]] / rate
        bound = [max(alone, wire) for alone in compute]
        target = _TARGET if name.startswith("shardlib") else None
        against = f"max(compute {statistics.median(compute):.2f} s, wire {wire:.2f} s)"
        seconds = statistics.median(times[name]), statistics.median(bound)
        rows.append(Row(name, against, target, ratio(times[name], bound), seconds))
    text = (
        "The same GPT, one rank per network namespace, joined by a veth pair whose two ends are shaped by tbf to "
        f"{_RATE}; a raw gloo send of {_PROBE >> 20} MB reached {rate * 8 / 1e9:.3f} Gbit/s each way at once. Compute is "
        "`train_step` on a mesh of one, on both ranks at once, a turn of every round; wire is the payload one rank sends "
        f"per step at that rate, as planned (for DDP as at stage 0, for fully_shard as at stage 3). {rounds} rounds."
    )
    return Section(_TITLE, text, rows, times=times)


@contextmanager
def _link() -> Iterator[None]:
    """Two namespaces and the shaped link between them; gone afterwards, whatever happens."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise FileNotFoundError("iproute2")
    try:
        for space in _SPACES:
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", _LINKS[0], "type", "veth", "peer", "name", _LINKS[1])
        for space, link, address in zip(_SPACES, _LINKS, _ADDRESSES, strict=True):
            _run("ip", "link", "set", link, "netns", space)
            _run("ip", "-n", space, "addr", "add", f"{address}/30", "dev", link)
            _run("ip", "-n", space, "link", "set", link, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", _RATE, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", space, "qdisc", "add", "dev", link, *shape)
        yield
    finally:
        for space in _SPACES:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _ranks(rounds: int) -> dict[str, Any]:
    processes = []
    for rank, (space, link) in enumerate(zip(_SPACES, _LINKS, strict=True)):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": _ADDRESSES[0],
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": link,
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "benchmarks.slow_network", str(rounds)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return json.loads(outputs[0].splitlines()[-1])


def _rank(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = Config()
    mesh = sl.make_mesh()
    rate = _rate(mesh)
    steps = {provider.name: provider.make(config) for provider in providers()} | {_COMPUTE: _alone(config)}
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda number, step=step: step(random_batch(config, number * mesh.size + mesh.rank))
        for name, step in steps.items()
    }
    for call in calls.values():
        for number in range(_WARM):
            call(number)
    times = interleave(calls, rounds, dist.barrier)
    return {"rate": rate, "payload": [_payload(config, stage) for stage in range(4)], "times": times}


def _alone(config: Config) -> Step:
    optimizer = sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
    state, train_step = sl.make_train_step(make_loss(config), params_of(GPT(config)), optimizer)

    def step(batch: Batch) -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"].item()

    return step


def _payload(config: Config, stage: int) -> int:
    """Bytes one rank sends per step, as planned."""
    params, batch = params_of(GPT(config)), random_batch(config, 0)
    mesh = sl.abstract_mesh(data=2)
    return sl.make_plan(params, mesh, sl.zero(stage), loss_fn=make_loss(config), batch=batch).payload()["data"]


def _rate(mesh: sl.Mesh) -> float:
    """Bytes per second each way, both ranks sending at once; the median of five."""
    peer = 1 - mesh.rank
    out, into = torch.ones(_PROBE // 4), torch.empty(_PROBE // 4)
    seconds = []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        for work in (dist.irecv(into, peer), dist.isend(out, peer)):
            work.wait()
        seconds.append(time.perf_counter() - start)
    return _PROBE / statistics.median(seconds[1:])


if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]))))

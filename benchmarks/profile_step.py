"""A profile of shardlib's step: ``python -m benchmarks.profile_step [--steps 8]``, two gloo ranks.

Prints milliseconds per step of rank 0, wall clock and processor time, in the calls that do not compute the model. The rest is
forward, backward and the host's overhead. Processor time of the whole process includes gloo's threads, and does not grow when
something else runs on the machine.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

import shardlib as sl
from benchmarks.peers.gpt import Config, random_batch
from benchmarks.peers.shardlib import shardlib_stage
from shardlib.collectives import primitives
from shardlib.plan.buckets import Bucket
from shardlib.sharded.gather import Gather
from shardlib.sharded.reduction import Reduction

_CALLS = {
    "gather start": (Gather, "_launch"),
    "gather wait": (Gather, "wait"),
    "reduce start": (Reduction, "_launch"),
    "reduce wait": (Reduction, "wait"),
    "pack gradients": (Bucket, "pack"),
    "owner segment": (Bucket, "owner_segment"),
    "optimizer": (torch, "_fused_adamw_"),
    "squares": (torch.linalg, "vector_norm"),
    "all-reduce start": (primitives, "all_reduce"),
}


def profile(mesh: sl.Mesh, stage: int, steps: int) -> dict[str, tuple[float, float]]:
    """Name of a call -> (wall seconds, processor seconds) per step."""
    torch.set_num_threads(1)
    config = Config()
    step = shardlib_stage(stage).make(config)
    for number in range(3):
        step(random_batch(config, number))
    wall: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    patches = [patch.object(*call, _timed(name, call, wall, cpu)) for name, call in _CALLS.items()]
    for one in patches:
        one.start()
    whole = time.perf_counter(), time.process_time()
    own = time.thread_time()
    for number in range(steps):
        step(random_batch(config, number))
    cpu["main thread"] = time.thread_time() - own
    wall["step, all threads"] = time.perf_counter() - whole[0]
    cpu["step, all threads"] = time.process_time() - whole[1]
    for one in patches:
        one.stop()
    return {name: (wall[name] / steps, cpu[name] / steps) for name in cpu}


def _timed(name: str, call: tuple[Any, str], wall: Counter[str], cpu: Counter[str]) -> Any:
    fn = getattr(*call)

    @functools.wraps(fn)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter(), time.thread_time()
        try:
            return fn(*args, **kwargs)
        finally:
            wall[name] += time.perf_counter() - start[0]
            cpu[name] += time.thread_time() - start[1]

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    arguments = parser.parse_args()
    for stage in arguments.stages:
        times = sl.launch(profile, stage, arguments.steps, mesh={"data": 2})[0]
        print(f"stage {stage}: ms per step     wall     CPU")
        for name, (wall, cpu) in sorted(times.items(), key=lambda item: -item[1][1]):
            print(f"  {name:22} {1000 * wall:8.1f} {1000 * cpu:7.1f}")


if __name__ == "__main__":
    main()

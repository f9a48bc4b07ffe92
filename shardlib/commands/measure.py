"""The rates of this machine, measured on all of its ranks at once, since they share what they compute and send with."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from shardlib import optim
from shardlib.collectives import primitives
from shardlib.make_plan import make_plan
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import block
from shardlib.plan.machine import PRECISIONS, Link, Machine, Overheads
from shardlib.plan.prediction.step import predict_on
from shardlib.plan.transform import Transform, chain
from shardlib.report.launches import measure_launches
from shardlib.shard import shard
from shardlib.train import make_train_step
from shardlib.transforms import accumulate, zero

_ROUNDS = 7
_SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices whose product is timed
_STREAMED = {"cpu": 1 << 22, "cuda": 1 << 27}  # elements that are added up
_SENT = (1 << 6, 1 << 22)  # elements of a small message and of a large one
_TINY = 8  # width of the layers whose steps show what Python takes


def measure_machine(mesh: Mesh) -> Machine:
    """What the ranks of a mesh of one axis have and do per second; they are taken to be all ranks of one host.

    Products of square matrices, additions of long vectors, the smallest operators, gathers of few and of many bytes; and
    steps of models so small that Python takes all of their time, from which the overheads follow: those that are not
    negative and come nearest to what was measured.
    """
    kind = mesh.device.type
    rates = {name: _products(mesh, dtype) for name, dtype in PRECISIONS.items() if name != "fp64"}
    streaming = 12 * _STREAMED[kind] / _seconds(mesh, _addition(mesh))
    bare = Machine(
        memory=_memory(mesh),
        flops=rates,
        inside=_link(mesh),
        ranks_per_host=mesh.size,
        streaming=streaming,
        launches=_agreed(mesh, 1 / measure_launches(mesh.device)) ** -1,
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ways={"update": streaming},
    )
    return replace(bare, overheads=_overheads(mesh, bare))


def _seconds(mesh: Mesh, call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks make at once: the median over rounds, after a first one; the mean over ranks."""
    times = []
    for _ in range(1 + _ROUNDS):
        primitives.all_gather_object(mesh, list(mesh.shape), None)
        start = time.perf_counter()
        call()
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)
        times.append(time.perf_counter() - start)
    return _agreed(mesh, statistics.median(times[1:]))


def _agreed(mesh: Mesh, seconds: float) -> float:
    return statistics.fmean(primitives.all_gather_object(mesh, list(mesh.shape), seconds))


def _products(mesh: Mesh, dtype: torch.dtype) -> float:
    side = _SIDE[mesh.device.type]
    a, b = (torch.ones(side, side, dtype=dtype, device=mesh.device) for _ in range(2))
    return 2 * side**3 / _seconds(mesh, lambda: a @ b)


def _addition(mesh: Mesh) -> Callable[[], Any]:
    x, y, out = (torch.ones(_STREAMED[mesh.device.type], device=mesh.device) for _ in range(3))
    return lambda: torch.add(x, y, out=out)


def _memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.size


def _link(mesh: Mesh) -> Link:
    """The bandwidth of a rank in a large gather, and what each hop of a small one takes."""
    (axis,) = mesh.shape
    if mesh.size == 1:
        return Link(math.inf)

    def gather(elements: int) -> float:
        sent = torch.ones(elements, device=mesh.device)
        out = sent.new_empty(elements * mesh.size)
        return _seconds(mesh, lambda: primitives.all_gather(mesh, axis, out, sent).wait())

    small, large = map(gather, _SENT)
    return Link(4 * _SENT[1] * (mesh.size - 1) / max(large - small, 1e-9), small / (mesh.size - 1))


def _overheads(mesh: Mesh, machine: Machine) -> Overheads:
    """What is left of the seconds of tiny steps, by what they have more of."""
    names = list(asdict(Overheads()))
    rows, left = [], []
    for layers, transform in _tiny(mesh):
        plan, seconds = _step(mesh, layers, transform)
        base = predict_on(plan, machine).total
        # A second for one of them is more than all else, so that the clock counts how often it is taken.
        often = [predict_on(plan, replace(machine, overheads=Overheads(**{name: 1.0}))).total - base for name in names]
        rows.append([number / seconds for number in often])  # errors count in shares of a step
        left.append((seconds - base) / seconds)
    return Overheads(**_least_squares(names, np.array(rows), np.array(left)))


def _least_squares(names: list[str], rows: np.ndarray, left: np.ndarray) -> Mapping[str, float]:
    """The values, none of them negative, with which rows come nearest to what is left: by leaving negative ones out."""
    kept = list(range(len(names)))
    while kept:
        found = np.linalg.lstsq(rows[:, kept], left, rcond=None)[0]
        if (found >= 0).all():
            return {names[at]: float(value) for at, value in zip(kept, found, strict=True)}
        kept.pop(int(found.argmin()))
    return {}


def _tiny(mesh: Mesh) -> list[tuple[int, Transform]]:
    """Numbers of layers, and transforms, that differ in what Python does."""
    stages = range(4) if mesh.size > 1 else range(1)
    one = [(layers, zero(stage)) for stage in stages for layers in (4, 16)]
    return [*one, *((8, chain(zero(stage), accumulate(4))) for stage in stages)]


def _step(mesh: Mesh, layers: int, transform: Transform) -> tuple[Any, float]:
    """A plan and the seconds of its step."""
    params = [{"w": torch.eye(_TINY), "b": torch.zeros(_TINY)} for _ in range(layers)]
    batch, tx = torch.ones(4, _TINY, device=mesh.device), optim.adamw(1e-3)
    plan = make_plan(params, mesh, transform, loss_fn=_loss, batch=batch, optimizer=tx)
    state, step = make_train_step(_loss, shard(params, mesh, transform), tx)

    def train() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        metrics["loss"].item()

    return plan, _seconds(mesh, train)


@block
def _layer(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, params["w"], params["b"]))


def _loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = _layer(layer, x)
    return x.square().mean()

"""The rates of this machine, measured on all of its ranks at once, since they share what they compute and send with."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shardlib import optim
from shardlib.collectives import primitives
from shardlib.execute.counting import WorkCount
from shardlib.mesh.mesh import Mesh
from shardlib.models import gpt
from shardlib.plan.machine import PRECISIONS, Link, Machine, Overheads
from shardlib.plan.prediction import predict_on
from shardlib.plan.transform import Transform, chain
from shardlib.planning import make_plan
from shardlib.sharding import shard
from shardlib.train import make_train_step
from shardlib.transforms import accumulate, remat, zero
from shardlib.tree import Tree, leaves_of, tree_map

_ROUNDS = 7
_SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices whose product is timed
_STREAMED = {"cpu": 1 << 22, "cuda": 1 << 27}  # elements that are added up
_SENT = 1 << 6  # elements of a small message
_WHILE = 0.1  # seconds that a large one is on its way, or some more
_TIMES = 16  # that a small one is waited for between computations
_WIDTHS = {"cpu": 1, "cuda": 8}  # by how much the models are wider, whose operators are timed
_SIZES = ((32, (1, 32)), (32, (8, 128)), (128, (4, 128)), (256, (1, 128)), (256, (4, 128)))  # width, rows × tokens
_TINY = gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2, sequence=8)  # whose steps show what Python takes


def measure_machine(mesh: Mesh) -> Machine:
    """What the ranks of a mesh of one axis have and do per second; they are taken to be all ranks of one host.

    Measured are products of square matrices; forward and backward of GPTs of several sizes, from which follows what their
    operators take by their launches, bytes and operations; additions in place, as in updates; gathers and sums of few and
    of many bytes, what processors do for them, and how long ranks that compute between them wait; and steps of models so
    small that Python takes most of their time, from which the overheads follow. What follows is not negative and comes
    nearest to what was measured.
    """
    kind = mesh.device.type
    flops = {name: _products(mesh, dtype) for name, dtype in PRECISIONS.items() if name != "fp64"}
    updating = 12 * _STREAMED[kind] / _computing(mesh, _addition(mesh))
    streaming, launches = _operators(mesh, flops["fp32"])
    bare = Machine(
        memory=_memory(mesh),
        flops=flops,
        inside=_link(mesh),
        ranks_per_host=mesh.size,
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        streaming=streaming,
        launches=launches,
        updating=updating,
        crowd=max(1.0, _busy(mesh)),
        ways={**_copies(mesh), "update": updating},
    )
    return replace(bare, overheads=_overheads(mesh, bare))


def _seconds(mesh: Mesh, call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call that all ranks make at once: the median over rounds, after a first one; the mean over ranks."""
    times = []
    for _ in range(1 + _ROUNDS):
        primitives.all_gather_object(mesh, list(mesh.shape), None)
        start = clock()
        call()
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)
        times.append(clock() - start)
    return _agreed(mesh, statistics.median(times[1:]))


def _computing(mesh: Mesh, call: Callable[[], Any]) -> float:
    """Seconds that a call computes, with all ranks at once. On processors what others do with them meanwhile does not count,
    and ranks that are more than processors share them."""
    if mesh.device.type != "cpu":
        return _seconds(mesh, call)
    return max(1.0, _busy(mesh)) * _seconds(mesh, call, time.thread_time)


def _busy(mesh: Mesh) -> float:
    """Threads that compute, of all ranks, for each processor that any of them may use; 0 where devices compute."""
    if mesh.device.type != "cpu":
        return 0.0
    # Linux tells which processors this process may use; elsewhere all of them count.
    own = os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))
    given = primitives.all_gather_object(mesh, list(mesh.shape), (torch.get_num_threads(), own))
    threads, processors = zip(*given, strict=True)
    return sum(threads) / len(set().union(*processors))


def _agreed(mesh: Mesh, seconds: float) -> float:
    return statistics.fmean(primitives.all_gather_object(mesh, list(mesh.shape), seconds))


def _products(mesh: Mesh, dtype: torch.dtype) -> float:
    side = _SIDE[mesh.device.type]
    a, b = (torch.ones(side, side, dtype=dtype, device=mesh.device) for _ in range(2))
    return 2 * side**3 / _computing(mesh, lambda: a @ b)


def _addition(mesh: Mesh) -> Callable[[], Any]:
    x, y, out = (torch.ones(_STREAMED[mesh.device.type], device=mesh.device) for _ in range(3))
    return lambda: torch.add(x, y, out=out)


def _copies(mesh: Mesh) -> dict[str, float]:
    """Bytes per second down to the host's memory and up from it."""
    here = torch.ones(_STREAMED[mesh.device.type], device=mesh.device)
    there = torch.empty(here.shape, pin_memory=mesh.device.type != "cpu").copy_(here)
    calls = {"down": lambda: there.copy_(here), "up": lambda: here.copy_(there)}
    return {way: here.nbytes / _computing(mesh, call) for way, call in calls.items()}


def _memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.size


def _operators(mesh: Mesh, flops: float) -> tuple[float, float]:
    """Bytes per second of operators that are no products, and launches per second, of forward and backward: in memory that is
    new for each of them, and with Python between them. What products take at a rate ``flops`` is left out."""
    rows, left = [], []
    for width, (count, length) in _SIZES:
        config = replace(_TINY, layers=2, width=width * _WIDTHS[mesh.device.type], heads=4, sequence=length)
        params = tree_map(lambda leaf: leaf.to(mesh.device).requires_grad_(), gpt.init(config))
        gradient, work = partial(_gradient, gpt.make_loss(config), params, _batch(config, count, mesh)), WorkCount()
        with work:
            gradient()
        seconds = _computing(mesh, gradient)
        rows.append([sum(work.streamed) / seconds, sum(work.launches) / seconds])  # errors count in shares of a step
        left.append(1 - sum(work.flops) / flops / seconds)
    found = _least_squares(["streaming", "launches"], np.array(rows), np.array(left))
    streaming, launches = (1 / found[name] if found.get(name) else math.inf for name in ("streaming", "launches"))
    return streaming, launches


def _gradient(loss_fn: Callable[..., torch.Tensor], params: Tree, batch: Tree) -> Any:
    return torch.autograd.grad(loss_fn(params, batch), leaves_of(params))


def _link(mesh: Mesh) -> Link:
    """The bandwidth of a rank in large exchanges, what small ones wait for, and what a processor does for a byte."""
    (axis,) = mesh.shape
    if mesh.size == 1:
        return Link(math.inf)

    def gathering(elements: int) -> Callable[[], Any]:
        sent = torch.ones(elements, device=mesh.device)
        out = sent.new_empty(elements * mesh.size)
        return lambda: primitives.all_gather(mesh, axis, out, sent).wait()

    def summing(elements: int) -> Callable[[], Any]:
        values = torch.ones(elements * mesh.size // 2, device=mesh.device)  # so that as many are sent
        return lambda: primitives.all_reduce(mesh, axis, values).wait()

    return replace(_rates(mesh, gathering), sums=replace(_rates(mesh, summing), latency=_waits(mesh, summing(_SENT))))


def _rates(mesh: Mesh, exchanging: Callable[[int], Callable[[], Any]]) -> Link:
    """The rates of exchanges in which a rank sends some elements to each of the others."""
    elements = _SENT
    small = large = _seconds(mesh, exchanging(elements))
    while large < max(_WHILE, 4 * small):
        elements *= 4
        large = _seconds(mesh, exchanging(elements))
    sent = 4 * elements * (mesh.size - 1)
    busy = _busy(mesh)  # processors that are idle while ranks compute send beside them
    work = busy * _seconds(mesh, exchanging(elements), time.process_time) if busy >= 1 else 0.0
    return Link(sent / (large - small), small / (mesh.size - 1), work / sent)


def _waits(mesh: Mesh, exchange: Callable[[], Any]) -> float:
    """Seconds of one hop where ranks compute between small exchanges, as they do in a model that is sliced: each waits for
    the slowest, and for the processor that the others have."""
    side = _SIDE[mesh.device.type]
    a, b = (torch.ones(side, side, device=mesh.device) for _ in range(2))

    def computing(between: Callable[[], Any]) -> None:
        for _ in range(_TIMES):
            a @ b
            between()

    waiting = _seconds(mesh, partial(computing, exchange)) - _seconds(mesh, partial(computing, lambda: None))
    return max(0.0, waiting / _TIMES / (mesh.size - 1))


def _overheads(mesh: Mesh, machine: Machine) -> Overheads:
    """What is left of the seconds of tiny steps, by what they have more of."""
    names = list(asdict(Overheads()))
    rows, left = [], []
    for layers, transform in _tiny(mesh):
        plan, seconds = _step(mesh, layers, transform)
        base = predict_on(plan, machine).compute
        # A second for one of them is more than all else, so that the clock counts how often it is taken.
        often = [
            predict_on(plan, replace(machine, overheads=Overheads(**{name: 1.0}))).compute - base for name in names
        ]
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
    one: list[tuple[int, Transform]] = [(layers, zero(stage)) for stage in stages for layers in (1, 4)]
    one += [(layers, chain(zero(0), remat())) for layers in (1, 4)]
    return [*one, *((2, chain(zero(stage), accumulate(4))) for stage in stages)]


def _step(mesh: Mesh, layers: int, transform: Transform) -> tuple[Any, float]:
    """A plan and the seconds of its step."""
    config = replace(_TINY, layers=layers)
    params, loss_fn = gpt.init(config), gpt.make_loss(config)
    batch, tx = _batch(config, 4, mesh), optim.adamw(1e-3)
    plan = make_plan(params, mesh, transform, loss_fn=loss_fn, batch=batch, optimizer=tx)
    state, step = make_train_step(loss_fn, shard(params, mesh, transform), tx)

    def train() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        metrics["loss"].item()

    return plan, _computing(mesh, train)


def _batch(config: gpt.GPTConfig, rows: int, mesh: Mesh) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, config.sequence, dtype=torch.int64, device=mesh.device)
    return {"tokens": tokens, "targets": tokens}

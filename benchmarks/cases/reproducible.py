"""`sl.reproducible`: the SHA-256 of training runs on different meshes, and its cost against plain accumulation."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave
from shardlib.data.bytes import batch_at, load_bytes
from shardlib.models import gpt
from shardlib.tree import leaves_of

_HEADER = ("section", "what", "round", "value")
_TOTAL, _STEPS = 24, 50  # micro-batches of all ranks, steps
_BITS = gpt.GPTConfig(vocab=256, layers=2, width=32, heads=2, sequence=32, dropout=0.1)
_TIMED = gpt.GPTConfig(vocab=256, layers=4, width=256, heads=4, sequence=128)
_SMALL = gpt.GPTConfig(vocab=256, layers=1, width=16, heads=2, sequence=8)


class _Where(NamedTuple):
    """Ranks along each axis, and how they share the state and the work."""

    data: int = 1
    node: int = 1
    pipe: int = 1
    stage: int = 0
    schedule: str = "1f1b"

    @property
    def mesh(self) -> dict[str, int]:
        sizes = {"node": self.node, "pipe": self.pipe, "data": self.data}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}

    def transforms(self, total: int) -> list[Any]:
        """All transforms but `reproducible` and `precision`, for ``total`` micro-batches of all ranks."""
        stages = [sl.pipeline(self.schedule, microbatches=total // self.shares)] if self.pipe > 1 else []
        return [sl.zero(self.stage, replicate="node" if self.node > 1 else None), *stages]

    @property
    def shares(self) -> int:
        """The number of ranks that divide the batch."""
        return self.node * self.data


_MESHES = (
    _Where(),
    _Where(data=2),
    _Where(data=2, stage=3),
    _Where(data=3, stage=1),
    _Where(data=4, stage=0),
    _Where(data=4, stage=2),
    _Where(data=6, stage=3),
    _Where(data=8, stage=1),
    _Where(data=8, stage=3),
    _Where(node=2, data=2, stage=2),
    _Where(node=2, data=3, stage=3),
    _Where(pipe=2, data=2, stage=1),
    _Where(pipe=3, data=2, stage=0, schedule="gpipe"),
    _Where(pipe=2, data=3, stage=3, schedule="zb-h1"),
    _Where(pipe=2, node=2, data=2, stage=3),
)
_PLAIN, _FP32, _BF16 = "accumulate, fp32", "reproducible, fp32", "reproducible, bf16"


def bits(setting: Setting) -> Result:
    """The bits of the same training on each mesh, in processes of their own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config, meshes, steps = (_SMALL, _MESHES[:2], 2) if setting.small else (_BITS, _MESHES, _STEPS)
    found: dict[_Where, Mapping[str, str]] = {}
    for where in meshes:
        ranks = sl.launch(_digests, config, where, steps, mesh=where.mesh, timeout=1800)
        if any(rank != ranks[0] for rank in ranks):
            raise AssertionError(f"ranks of {where} differ: {ranks}")
        found[where] = ranks[0]
    for name in (_FP32, _BF16):
        if len({digests[name] for digests in found.values()}) > 1:
            raise AssertionError(f"{name}: the bits differ: {[(where, d[name]) for where, d in found.items()]}")
    columns = ["ranks", "mesh", "stage", "schedule", *(f"{name}" for name in (_FP32, _BF16, _PLAIN))]
    cells = [
        [
            where.shares * where.pipe,
            " × ".join(f"{axis}={size}" for axis, size in where.mesh.items()),
            where.stage,
            where.schedule if where.pipe > 1 else "",
            *(f"`{digests[name][:12]}`" for name in (_FP32, _BF16, _PLAIN)),
        ]
        for where, digests in found.items()
    ]
    different = len({digests[_PLAIN] for digests in found.values()})
    about = (
        f"The byte-level GPT ({config.layers} layers, width {config.width}, dropout {config.dropout}) on the sources of "
        f"Python's standard library, {_TOTAL} rows of {config.sequence} bytes per step as {_TOTAL} micro-batches, AdamW with "
        f"clipping by the global norm, {steps} steps on gloo processes of one thread. The first 12 digits of the SHA-256 "
        f"of losses, norms and parameters. Beside `sl.reproducible({_TOTAL})` the same without it, by `sl.accumulate` or "
        f"`sl.pipeline`: {different} different values on {len(found)} meshes. In full, "
        + "; ".join(f"{name}: `{next(iter(found.values()))[name]}`" for name in (_FP32, _BF16))
        + "."
    )
    title = f"SHA-256 after {steps} steps"
    samples = [(title, f"{name}, {where}", steps, digest) for where, d in found.items() for name, digest in d.items()]
    return Result(tables.section(title, about, tables.grid(columns, cells)), _HEADER, samples)


def _digests(mesh: sl.Mesh, config: gpt.GPTConfig, where: _Where, steps: int) -> dict[str, str]:
    """Name -> the SHA-256 of a run."""
    torch.set_num_threads(1)
    parts, precision = where.transforms(_TOTAL), sl.precision("bf16")
    plain = [] if where.pipe > 1 else [sl.accumulate(_TOTAL // where.shares)]
    chains = {
        _FP32: [*parts, sl.reproducible(_TOTAL)],
        _BF16: [*parts, sl.reproducible(_TOTAL), precision],
        _PLAIN: [*parts, *plain],
    }
    return {name: _digest(mesh, config, where, sl.chain(*chain), steps) for name, chain in chains.items()}


def _digest(mesh: sl.Mesh, config: gpt.GPTConfig, where: _Where, transform: Any, steps: int) -> str:
    state, step = _made(mesh, config, transform)
    digest = hashlib.sha256()
    share = where.data * mesh.coords.get("node", 0) + mesh.coords["data"]
    for number in range(steps):
        batch = batch_at(_text(), _TOTAL, config.sequence, seed=0, step=number, rank=share, ranks=where.shares)
        state, metrics = step(state, batch)
        digest.update(struct.pack("<dd", metrics["loss"].item(), metrics["grad_norm"].item()))
    for leaf in leaves_of(sl.unshard(state.params)):
        digest.update(leaf.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _made(mesh: sl.Mesh, config: gpt.GPTConfig, transform: Any) -> tuple[sl.TrainState, Any]:
    params = sl.shard(gpt.to_blocks(gpt.init(config)), mesh, transform)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-3))
    return sl.make_train_step(gpt.make_sequential(config), params, tx)


def cost(setting: Setting) -> Result:
    """Time and memory of a step on two ranks, against `accumulate` with as many micro-batches."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config, configs = _TIMED, [(stage, count) for stage in (0, 2, 3) for count in (1, 3, 4)]
    if setting.small:
        config, configs = _SMALL, [(2, 3)]
    times, rows, memory = {}, [], []
    for stage, count in configs:
        names = [f"{what}, stage {stage}, {count} per rank" for what in ("reproducible", "accumulate")]
        measured = sl.launch(_timed, config, stage, count, setting.rounds, mesh={"data": 2}, timeout=1800)[0]
        times |= dict(zip(names, measured, strict=True))
        rows.append(tables.row(times, *names))
        peaks = [
            max(sl.launch(_peak, config, stage, count, ordered, mesh={"data": 2}, timeout=1800))
            for ordered in (True, False)
        ]
        memory.append((names[0], peaks))
    count = gpt.parameters_count(config)
    about = (
        f"The byte-level GPT ({config.layers} layers, width {config.width}; gradients in fp32 are {4 * count / 1e6:.1f} MB), "
        f"{_TOTAL} rows of {config.sequence} bytes, AdamW with clipping, two gloo ranks of one thread each, with 1, 3 or 4 "
        f"micro-batches per rank; 3 are two nodes of the tree. {setting.rounds} rounds; both take turns in the same two "
        "processes. The second table is the largest resident memory of a process during two steps, "
        "after two others, in processes of their own."
    )
    timed = tables.compared("What `reproducible` costs", about, rows, times)
    grid = tables.grid(
        ["", "peak of `reproducible`, MB", "of `accumulate`, MB"],
        [(name, *(f"{peak / 1e6:.0f}" for peak in peaks)) for name, peaks in memory],
    )
    samples = [(*what, value) for *what, value in timed.samples]
    samples += [("memory, bytes", f"{name}, {k}", 0, peak) for name, p in memory for k, peak in zip(("it", "plain"), p)]
    return Result("\n".join([timed.text, *grid]) + "\n", _HEADER, samples, timed.rows)


def _transform(stage: int, count: int, ordered: bool) -> Any:
    return sl.chain(sl.zero(stage), sl.reproducible(2 * count) if ordered else sl.accumulate(count))


def _batch(config: gpt.GPTConfig, mesh: sl.Mesh, number: int) -> dict[str, torch.Tensor]:
    return batch_at(_text(), _TOTAL, config.sequence, seed=0, step=number, rank=mesh.rank, ranks=mesh.size)


@functools.cache
def _text() -> np.ndarray:
    return load_bytes()


def _timed(mesh: sl.Mesh, config: gpt.GPTConfig, stage: int, count: int, rounds: int) -> list[list[float]]:
    torch.set_num_threads(1)
    runs = {ordered: list(_made(mesh, config, _transform(stage, count, ordered))) for ordered in (True, False)}

    def step(ordered: bool, number: int) -> None:
        state, train_step = runs[ordered]
        runs[ordered][0], _ = train_step(state, _batch(config, mesh, number))

    calls = {str(ordered): lambda number, ordered=ordered: step(ordered, number) for ordered in runs}
    return list(interleave(calls, rounds, warm=2, barrier=dist.barrier).values())


def _peak(mesh: sl.Mesh, config: gpt.GPTConfig, stage: int, count: int, ordered: bool) -> int:
    """Bytes of the process's largest resident memory during two steps."""
    torch.set_num_threads(1)
    state, step = _made(mesh, config, _transform(stage, count, ordered))
    for number in range(4):
        if number == 2:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        state, _ = step(state, _batch(config, mesh, number))
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0])


CASES = (
    Case("reproducible_bits", "SHA-256 of one training on fifteen meshes and stages", {CPU: 1}, bits),
    Case("reproducible_cost", "time and memory of reproducible steps, against accumulate", {CPU: 10}, cost),
)

"""The largest GPT that trains on a device with a budget of memory: without offload, and with states and parameters elsewhere.

The device is the tests' own: its memory raises `torch.OutOfMemoryError` past a budget, as a GPU's does, and so does the
host's. Depth is searched from what a plan says. At the largest depth that trains, losses must be those of a run without
offload on a device without a budget, and one block more must be refused by one of the memories. With everything on disk
neither memory limits the depth, and a model trains whose parameters alone are a given multiple of the host's budget.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.rig import on_rig
from shardlib.models import gpt

_STEPS = 3
_HEADER = ("section", "what", "round", "value")
_TITLE = "The largest GPT on a device with a budget"
_MIB = 1 << 20


class _Way(NamedTuple):
    """A way to train, and what it is to reach.

    Attributes:
        transforms: of a folder for files.
        host: the host's budget, in budgets of the device; None for no bound.
        target: parameters, in those that train without offload.
        holds: bytes of the parameters that are to train, in budgets of the host; None to search for the most.
    """

    name: str
    transforms: Callable[[str], list[Any]]
    host: float | None
    target: float | None
    holds: float | None = None


_KEPT = {"store": "host", "smallest": 0}
_WAYS = (
    _Way("without offload", lambda _: [sl.zero(0), sl.remat()], None, None),
    _Way("states down", lambda _: [sl.zero(0), sl.offload(), sl.remat(**_KEPT)], None, 6.5),
    _Way(
        "parameters down",
        lambda _: [sl.zero(3), sl.offload(params="host", gradients="host"), sl.remat(**_KEPT)],
        22,
        20,
    ),
    _Way(
        "states on disk, parameters down",
        lambda folder: [
            sl.zero(3),
            sl.offload("disk", params="host", gradients="host", folder=folder),
            sl.remat(**_KEPT),
        ],
        5.5,
        20,
    ),
    _Way(
        "everything on disk",
        lambda folder: [
            sl.zero(3),
            sl.offload("disk", params="disk", gradients="disk", folder=folder),
            sl.remat(),
        ],
        0.375,
        None,
        holds=10,
    ),
)


class _Model(NamedTuple):
    """A family of models, by depth, and the device's budget in bytes."""

    width: int
    budget: int

    def config(self, layers: int) -> gpt.GPTConfig:
        return gpt.GPTConfig(vocab=64, layers=layers, width=self.width, heads=4, sequence=16)

    def batch(self, device: torch.device) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
        return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


class _Run(NamedTuple):
    """The losses of a run, and the most bytes that each memory held."""

    losses: list[float]
    device: int
    host: int
    disk: int


class _Largest(NamedTuple):
    """The largest depth that trains, its run, and which memory one block more exceeds; of a depth that is given, ""."""

    layers: int
    run: _Run
    limit: str


def measure(setting: Setting) -> Result:
    model, ways = (_Model(8, _MIB // 8), _WAYS[:2]) if setting.small else (_Model(32, 4 * _MIB), _WAYS)
    (found,) = on_rig(_all, model, ways)
    return _table(model, dict(zip(ways, found, strict=True)))


def _all(mesh: sl.Mesh, model: _Model, ways: Sequence[_Way]) -> list[_Largest]:
    torch.set_num_threads(1)
    return [_largest(mesh, model, way) for way in ways]


def _largest(mesh: sl.Mesh, model: _Model, way: _Way) -> _Largest:
    """Search the largest depth from what a plan says, by runs."""
    runs, limits = dict[int, _Run](), dict[int, str]()
    if way.holds:
        layers = _holding(model, way)
        runs, limits = {layers: _run(mesh, model, way, layers)}, {layers + 1: ""}
    for layers in () if way.holds else depths(_planned(mesh, model, way), runs, limits):
        try:
            runs[layers] = _run(mesh, model, way, layers)
        except (torch.OutOfMemoryError, MemoryError) as error:
            limits[layers] = "host memory" if "host" in str(error) else "device memory"
    layers = max(runs)
    unlimited = _run(mesh, model._replace(budget=0), _WAYS[0], layers)
    if runs[layers].losses != unlimited.losses:
        raise AssertionError(
            f"{way.name}: losses {runs[layers].losses}, and {unlimited.losses} without offload or budget"
        )
    return _Largest(layers, runs[layers], limits[layers + 1])


def _holding(model: _Model, way: _Way) -> int:
    """The depth whose parameters, in 16 bits, are as many host budgets as the way is to hold."""
    assert way.holds and way.host
    wanted = way.holds * way.host * model.budget
    few, more = (2 * gpt.parameters_count(model.config(layers)) for layers in (4, 5))
    return 4 + math.ceil((wanted - few) / (more - few))


def depths(first: int, runs: Mapping[int, Any], limits: Mapping[int, str]) -> Iterator[int]:
    """Depths to try until one trains and the next does not: away from the first in strides that double, then between."""
    stride, layers = 1, max(first, 1)
    while not (runs and limits):
        yield layers
        layers = max(runs) + stride if runs else max(min(limits) - stride, 1)
        stride *= 2
    while min(limits) - max(runs) > 1:
        yield (max(runs) + min(limits)) // 2


def _planned(mesh: sl.Mesh, model: _Model, way: _Way) -> int:
    """The depth that plans say is the largest: bytes grow by the same with each block."""
    budgets = {"device": model.budget, **({"host": int(way.host * model.budget)} if way.host else {})}
    few, more = ({memory: _bytes(mesh, model, way, layers, memory) for memory in budgets} for layers in (4, 12))
    deepest = []
    for memory, budget in budgets.items():
        each = (more[memory] - few[memory]) / 8
        if each > 0:
            deepest.append(4 + int((budget - few[memory]) / each))
    return min(deepest)


def _bytes(mesh: sl.Mesh, model: _Model, way: _Way, layers: int, memory: str) -> int:
    with tempfile.TemporaryDirectory(prefix="shardlib-benchmark-") as folder:
        config = model.config(layers)
        options = {"loss_fn": gpt.make_loss(config), "optimizer": _optimizer(), "batch": model.batch(mesh.device)}
        plan = sl.make_plan(gpt.init(config), mesh, _transform(way, folder), **options)
    return plan.peak_bytes if memory == "device" else plan.bytes("total", memory)


def _transform(way: _Way, folder: str) -> Any:
    return sl.chain(sl.precision("bf16", reduce_dtype="bf16"), *way.transforms(folder))


def _optimizer() -> sl.optim.GradientTransformation:
    return sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-3))


def _run(mesh: sl.Mesh, model: _Model, way: _Way, layers: int) -> _Run:
    """Train some steps within the budgets.

    Raises:
        torch.OutOfMemoryError, MemoryError: one of them is exceeded.
    """
    from helpers import rig

    gc.collect()  # what earlier runs left is not counted
    config, batch = model.config(layers), model.batch(mesh.device)
    rig.reset()
    before = rig.counts()
    budgets = {
        "budget": before.live + model.budget if model.budget else 0,
        "host": before.host + int(way.host * model.budget) if way.host and model.budget else 0,
    }
    with tempfile.TemporaryDirectory(prefix="shardlib-benchmark-") as folder, rig.limits(**budgets):
        sharded = sl.shard(partial(gpt.init, config), mesh, _transform(way, folder))
        state, train_step = sl.make_train_step(gpt.make_loss(config), sharded, _optimizer())
        del sharded
        losses = []
        for _ in range(_STEPS):
            state, metrics = train_step(state, batch)
            losses.append(metrics["loss"].item())
        torch.accelerator.synchronize()
        after, files = rig.counts(), sum(path.stat().st_size for path in Path(folder).rglob("*.*"))
        return _Run(losses, after.peak - before.live, after.host_peak - before.host, files)


def _table(model: _Model, found: Mapping[_Way, _Largest]) -> Result:
    cells, samples, counts = [], [], list[int]()
    for way, largest in found.items():
        counts.append(gpt.parameters_count(model.config(largest.layers)))
        count, run = counts[-1], largest.run
        times = count / counts[0]
        budgets = 2 * count / (way.host * model.budget) if way.host else None
        aims = ((times, way.target, "without"), (budgets, way.holds, "host"))
        verdicts = [
            f"≥ {aim:g} × {what} {'met' if (found or 0) >= aim else 'missed'}" for found, aim, what in aims if aim
        ]
        held = (f"{size / _MIB:,.1f} ({size / count:.2f})" for size in (run.device, run.host, run.disk))
        host = "" if way.host is None else f"{way.host * model.budget / _MIB:g}"
        of_host = "" if budgets is None else f"{budgets:.2f}"
        cells.append(
            [
                way.name,
                host,
                largest.layers,
                f"{count:,}",
                f"{times:.1f}",
                of_host,
                *held,
                largest.limit,
                *(verdicts or [""]),
            ]
        )
        samples += [(_TITLE, f"{way.name}, loss", step, loss) for step, loss in enumerate(run.losses)]
        samples += [(_TITLE, f"{way.name}, {name}", 0, value) for name, value in (("parameters", count), *_sizes(run))]
    about = (
        f"A device with {model.budget / _MIB:g} MiB: the tests' own, with a memory that raises out-of-memory errors past a "
        f"budget. The GPT has blocks of width {model.width} and {model.config(1).sequence} tokens a step, in bf16 with fp32 "
        f"masters and AdamW behind a clip, gradients summed in bf16, every block recomputed. The largest number of blocks "
        f"that trains {_STEPS} steps, with the losses of a run without offload and budget to the last bit; with one block "
        "more a memory refuses. With everything on disk the number is given: parameters ten times the host's budget. In "
        "brackets bytes for each parameter; the host's include all tensors of the process. AdamW "
        "on this device is plain torch, whose temporary tensors a GPU's kernel does not need: without them about one block "
        "in ten more would train without offload."
    )
    columns = ["", "host budget, MiB", "blocks", "parameters", "× without", "their bytes, × host budget"]
    columns += ["device peak, MiB", "host peak, MiB", "on disk, MiB", "limited by", "target"]
    return Result(tables.section(_TITLE, about, tables.grid(columns, cells)), _HEADER, samples)


def _sizes(run: _Run) -> list[tuple[str, int]]:
    return [("device peak", run.device), ("host peak", run.host), ("on disk", run.disk)]


CASE = Case("budget", "the largest GPT that trains on a device with a budget of memory", {CPU: 1}, measure)

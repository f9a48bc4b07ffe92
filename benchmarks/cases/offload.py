"""GPTs on one GPU with states, parameters and gradients in the host's memory: step times, and bytes on the device."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness import rates, tables
from benchmarks.harness.case import CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import medians
from shardlib.common.devices import pages
from shardlib.models import gpt
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform
from shardlib.tree import leaves_of, tree_map

_LARGE = gpt.GPTConfig(vocab=50304, layers=24, width=1792, heads=14, sequence=1024)  # 1.1 billion parameters
_LARGER = gpt.GPTConfig(vocab=50304, layers=32, width=4096, heads=32, sequence=1024)  # 6.9 billion
_SMALL = gpt.GPTConfig(vocab=512, layers=2, width=64, heads=4, sequence=64)
_ROWS = 16
_BF16 = sl.precision("bf16", reduce_dtype="bf16")
_DOWN: dict[str, Any] = {"params": "host", "gradients": "host"}
_LINK_BYTES = 2**28  # of the copies that measure the link

Step = Callable[[], None]


class _Way(NamedTuple):
    """Transforms, beside mixed precision, and a config; ``rounds`` is None for the setting's."""

    transforms: tuple[Transform, ...]
    config: gpt.GPTConfig = _LARGE
    rounds: int | None = None


_WAYS: Mapping[str, _Way] = {
    "on the device": _Way((sl.zero(0),)),
    "`offload()`": _Way((sl.zero(0), sl.offload())),
    "`offload(speculate=True)`": _Way((sl.zero(0), sl.offload(speculate=True))),
    "`offload(delay=True)`": _Way((sl.zero(0), sl.offload(delay=True))),
    '`offload(params="host", gradients="host")`': _Way((sl.zero(3), sl.offload(**_DOWN))),
    "`offload()`, `remat()`": _Way((sl.zero(0), sl.offload(), sl.remat()), _LARGER, 2),
}
_CHECKED: Mapping[str, Callable[[str], Transform]] = {
    "offload(speculate=True)": lambda _: sl.offload(speculate=True),
    "parameters and gradients in host memory": lambda _: sl.offload(**_DOWN),
    "states on disk": lambda folder: sl.offload("disk", folder=folder),
    "states and parameters on disk": lambda folder: sl.offload("disk", params="disk", folder=folder),
}


def check(device: torch.device) -> Checks:
    """Checks that all ways train alike to the last bit, and as the device alone does but for its kernels' rounding."""
    wanted, without = _losses(device, sl.offload()), _losses(device)
    error = max(abs(a - b) / b for a, b in zip(wanted, without, strict=True))
    checks = [("offload() against the device's own update", rates.outcome(error < 1e-4, f"{error:.1e}"))]
    for name, offload in _CHECKED.items():
        with tempfile.TemporaryDirectory() as folder:
            found = _losses(device, offload(folder))
        checks.append((f"{name} against offload()", rates.outcome(found == wanted, f"{len(found)} equal losses")))
    return checks


def _losses(device: torch.device, *offload: Transform) -> list[float]:
    """Losses of a few clipped steps."""
    parallel = sl.chain(sl.zero(3), _BF16, *offload)
    params = sl.shard(gpt.init(_SMALL, device=device), _mesh(device), parallel)
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(1e-2))
    state, step = sl.make_train_step(gpt.make_loss(_SMALL), params, optimizer)
    losses, batch = [], _batch(_SMALL, 4, device)
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def measure(setting: Setting) -> Result:
    """Milliseconds per step against the longest of computing, transfers and the update, and the device's peak."""
    ways = {name: way._replace(config=_SMALL) if setting.small else way for name, way in _WAYS.items()}
    link, times = _link(setting), {}
    alone = {config: _alone(config, setting) for config in dict.fromkeys(way.config for way in ways.values())}
    cells = []
    for name, (transforms, config, rounds) in ways.items():
        label = f"{name}, {config.layers} layers"
        trained = _train(config, transforms, setting, rounds or setting.rounds)
        times[label] = trained.seconds
        taken = medians(times)[label]
        moved = max(trained.plan.transfers().values(), default=0) / link
        compute, update = alone[config]
        longest = max(compute, moved, update if moved else 0.0)
        bounds = " / ".join(f"{1e3 * part:.0f}" for part in (compute, moved, update))
        cells.append(
            [
                name,
                f"{trained.plan.parameters / 1e9:.2f}",
                f"{1e3 * taken:.0f}",
                bounds,
                f"{taken / longest:.2f}",
                f"{trained.peak / 1e9:.1f}",
                f"{(trained.plan.peak_bytes or 0) / 1e9:.1f}",
            ]
        )
        print(" | ".join(cells[-1]), flush=True)
    about = (
        f"bf16 with fp32 masters, AdamW, {_rows(setting)} rows of {_LARGE.sequence} tokens, medians; the last row's model "
        "would take 16 bytes per parameter without offload. Compute is loss and gradients without an optimizer; transfer the "
        f"bytes of one direction at the rate of a copy from pinned memory ({link / 1e9:.1f} GB/s here); update the "
        f"optimizer's alone, by {torch.get_num_threads()} threads of the host. A peak is what torch's allocator gave out."
    )
    columns = [
        "",
        "10⁹ parameters",
        "ms per step",
        "compute / transfer / update, ms",
        "step / longest",
        "device peak, GB",
        "planned, GB",
    ]
    return tables.listed("Offload to the host's memory", about, columns, cells, times)


class _Trained(NamedTuple):
    """Seconds of each step, the plan, and bytes that torch's allocator gave out on the device at most."""

    seconds: list[float]
    plan: Plan
    peak: int


def _train(config: gpt.GPTConfig, transforms: tuple[Transform, ...], setting: Setting, rounds: int) -> _Trained:
    device, batch = setting.device, _batch(config, _rows(setting), setting.device)
    parallel, optimizer, loss_fn = sl.chain(*transforms, _BF16), sl.optim.adamw(1e-4), gpt.make_loss(config)
    plan = sl.make_plan(
        gpt.init(config, device="meta"), _mesh(device), parallel, loss_fn=loss_fn, batch=batch, optimizer=optimizer
    )
    params = sl.shard(partial(_initial, config, device), _mesh(device), parallel)
    state, train_step = sl.make_train_step(loss_fn, params, optimizer)
    del params
    held = [state]
    del state

    def step() -> None:
        held.append(train_step(held.pop(), batch)[0])

    seconds = _timed(step, rounds, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return _Trained(seconds, plan, peak)


def _alone(config: gpt.GPTConfig, setting: Setting) -> tuple[float, float]:
    """Seconds of computing loss and gradients on the device, and of the optimizer's update on the host."""
    compute, update = _computing(config, setting), _updating(config, setting)
    return medians({"": compute})[""], medians({"": update})[""]


def _computing(config: gpt.GPTConfig, setting: Setting) -> list[float]:
    device, batch = setting.device, _batch(config, _rows(setting), setting.device)
    parallel = sl.chain(sl.zero(0), _BF16, *((sl.remat(),) if config == _LARGER else ()))
    params = sl.shard(partial(_initial, config, device), _mesh(device), parallel)
    loss_fn = sl.value_and_grad(gpt.make_loss(config))
    return _timed(lambda: loss_fn(params, batch), setting.rounds // 2 or 1, device)


def _updating(config: gpt.GPTConfig, setting: Setting) -> list[float]:
    """A part of the parameters is updated, as the whole would take all of the memory again."""
    count = sum(leaf.numel() for leaf in leaves_of(gpt.init(config, device="meta")))
    size = min(count, 2**28)
    grads, masters = {"w": torch.randn(size)}, {"w": torch.randn(size)}
    optimizer = sl.optim.adamw(1e-4)
    states = [optimizer.init(masters)]
    update = _timed(lambda: states.append(optimizer.apply(masters, grads, states.pop())), 3, setting.device)
    return [seconds * count / size for seconds in update]


def _link(setting: Setting) -> float:
    """Bytes per second of a copy from pinned host memory."""
    size = 2**16 if setting.small else _LINK_BYTES
    host, target = (
        pages(size, setting.device.type == "cuda"),
        torch.empty(size, dtype=torch.uint8, device=setting.device),
    )
    return size / medians({"": _timed(lambda: target.copy_(host, non_blocking=True), 5, setting.device)})[""]


def _timed(call: Callable[[], Any], rounds: int, device: torch.device, warm: int = 2) -> list[float]:
    """Seconds of each call until the device is done: work of the host counts too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    seconds = []
    for _ in range(warm + rounds):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[warm:]


def _initial(config: gpt.GPTConfig, device: torch.device) -> Any:
    """Parameters of a config, drawn on the device: `gpt.init` draws the same on every device, which takes longer."""
    draw = torch.Generator(device).manual_seed(0)

    def leaf(like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, device=device).normal_(std=0.02, generator=draw)

    return tree_map(leaf, gpt.init(config, device="meta"))


def _rows(setting: Setting) -> int:
    return 2 if setting.small else _ROWS


def _batch(config: gpt.GPTConfig, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(config.vocab, (rows, config.sequence), generator=draw).to(device)
        for name in ("tokens", "targets")
    }


def _mesh(device: torch.device) -> sl.Mesh:
    return sl.Mesh({"data": 1}, 0, {}, device)


CASE = Case("offload", "GPTs of 1 and 7 billion parameters with states in the host's memory", {CUDA: 4}, measure, check)

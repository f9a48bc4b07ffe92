"""Saving and restoring against plain files, `torch.save` and `torch.distributed.checkpoint`; and what a step loses by it."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import one_thread, wall
from shardlib.models import gpt
from shardlib.tree import leaves_of

_RAW, _TORCH, _DCP, _OURS = "raw files", "torch.save", "dcp.save", "sl.checkpoint.save"
_READ, _TORCH_LOAD, _DCP_LOAD, _RESTORE = "reading raw files", "torch.load", "dcp.load", "sl.checkpoint.restore"
_EVERY = 20  # steps between asynchronous saves


@contextmanager
def _folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="shardlib-benchmark-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def _tensors(title: str, setting: Setting, leaves: int, elements: int, targets: dict[str, float]) -> Result:
    """Saving and loading tensors of one size, all on the disk (fsync) before a call returns."""
    if setting.small:
        leaves, elements = max(2, leaves // 100), max(2, elements // 1000)
    state = {f"w{index:04d}": torch.randn(elements) for index in range(leaves)}
    made, _ = sl.make_train_step(_no_loss, sl.shard(dict(state), sl.make_mesh()), sl.optim.sgd(0.1))
    out = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    with _folder() as root, one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        saves: dict[str, Callable[[int], Any]] = {
            _RAW: lambda n: _raw(root / f"raw-{n}", state),
            _TORCH: lambda n: _torch_save(root / f"torch-{n}", state),
            _DCP: lambda n: dcp.save(
                state, storage_writer=dcp.FileSystemWriter(root / f"dcp-{n}", sync_files=True), no_dist=True
            ),
            _OURS: lambda n: sl.checkpoint.save(root / f"ours-{n}", made, keep=1),
        }
        loads: dict[str, Callable[[int], Any]] = {
            _READ: lambda n: _read(root / f"raw-{n}", out),
            _TORCH_LOAD: lambda n: torch.load(root / f"torch-{n}"),
            _DCP_LOAD: lambda n: dcp.load(out, checkpoint_id=root / f"dcp-{n}", no_dist=True),
            _RESTORE: lambda n: sl.checkpoint.restore(root / f"ours-{n}", made),
        }
        times: dict[str, list[float]] = {name: [] for name in (*saves, *loads)}
        pairs = list(zip(saves.items(), loads.items(), strict=True))
        for number in range(setting.rounds + 1):  # the first round is not kept
            # Each file is gone before the next is written: memory that the system has not used before costs time.
            for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                for name, call in pair:
                    taken = wall(lambda call=call, number=number: call(number))  # type: ignore[misc]
                    if number:
                        times[name].append(taken)
                for path in root.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    rows = [
        tables.row(times, _OURS, _DCP, targets.get(_DCP)),
        tables.row(times, _OURS, _RAW, targets.get(_RAW)),
        tables.row(times, _OURS, _TORCH),
        tables.row(times, _RESTORE, _DCP_LOAD, targets.get(_DCP_LOAD)),
        tables.row(times, _RESTORE, _READ),
        tables.row(times, _RESTORE, _TORCH_LOAD),
    ]
    about = (
        f"{leaves} fp32 tensors of {elements:,} elements, one process of one thread, {setting.rounds} rounds; files are read "
        "while the system still holds them in memory. shardlib takes a checksum of every byte when it writes, and verifies "
        "all of them before it reads."
    )
    return tables.compared(title, about, rows, times)


def large(setting: Setting) -> Result:
    # 2 × the throughput of DCP, .7 of that of raw files.
    return _tensors("Checkpoints: 500 MB in 50 tensors", setting, 50, 2_500_000, {_DCP: 0.5, _RAW: 1 / 0.7})


def many(setting: Setting) -> Result:
    return _tensors("Checkpoints: 5,000 tensors of 1,000 elements", setting, 5000, 1000, {_DCP: 0.5})


def behind(setting: Setting) -> Result:
    """The step's added time, and the part of a save that a step waits for."""
    config = gpt.GPTConfig(vocab=8192, layers=8, width=512, heads=8, sequence=128)
    every, batch = _EVERY, 4
    if setting.small:
        config, every, batch = gpt.GPTConfig(vocab=64, layers=1, width=16, heads=2, sequence=8), 2, 2
    tokens = torch.randint(config.vocab, (batch, config.sequence), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens, "targets": tokens}
    with _folder() as root, one_thread():
        state, step = sl.make_train_step(
            gpt.make_loss(config), sl.shard(gpt.init(config), sl.make_mesh()), sl.optim.adamw(1e-4)
        )
        manager = sl.checkpoint.Manager(root, keep=1)
        copies = [buffer.clone() for buffer in _buffers(state)]

        def steps(save: bool) -> None:
            nonlocal state
            if save:
                manager.save(state)
            for _ in range(every):
                state, _ = step(state, data)
            if save:
                manager.wait()

        def copy() -> None:
            for target, buffer in zip(copies, _buffers(state), strict=True):
                target.copy_(buffer)

        def save() -> None:
            manager.save(state)

        times: dict[str, list[float]] = {}
        plain, saving, copying, blocking = (
            f"{every} steps",
            f"{every} steps and a save",
            "copying the state",
            "Manager.save",
        )
        for number in range(setting.rounds + 1):
            for name, call in (
                (plain, lambda: steps(False)),
                (saving, lambda: steps(True)),
                (copying, copy),
                (blocking, save),
            ):
                taken = wall(call)
                if name == blocking:
                    manager.wait()
                if number:
                    times.setdefault(name, []).append(taken)
    rows = [tables.row(times, saving, plain, 1.05), tables.row(times, blocking, copying, 1.5)]
    count = sum(buffer.numel() for buffer in _buffers(state)) // 3
    about = (
        f"A GPT of {count / 1e6:.0f}M parameters with AdamW's moments, fp32, one process of one thread on two cores, "
        f"{setting.rounds} rounds: steps alone, and with an asynchronous save at their beginning whose end is waited for; "
        "and the time that the call takes, against a copy of parameters and moments from memory to memory."
    )
    return tables.compared("Checkpoints: saving while training", about, rows, times)


def _buffers(state: sl.TrainState) -> list[torch.Tensor]:
    """The flat tensors of parameters and moments."""
    flat = [*state.params.buffers.values(), *leaves_of(state.opt)]
    return [leaf for leaf in flat if leaf.dim()]


def _no_loss(params: Any, batch: Any) -> torch.Tensor:
    return sum(leaf.sum() for leaf in params.values())  # type: ignore[return-value]


def _raw(path: Path, state: dict[str, torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            file.write(memoryview(tensor.numpy()))
        os.fsync(file.fileno())


def _read(path: Path, out: dict[str, torch.Tensor]) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in out.values():
            file.readinto(memoryview(tensor.numpy()).cast("B"))


def _torch_save(path: Path, state: dict[str, torch.Tensor]) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


CASES = (
    Case("checkpoint_large", "saving and restoring 500 MB, against DCP, torch.save and raw files", {CPU: 10}, large),
    Case("checkpoint_many", "saving and restoring 5,000 small tensors, against the same", {CPU: 5}, many),
    Case("checkpoint_behind", "what a training step loses by a save in the background", {CPU: 3}, behind),
)

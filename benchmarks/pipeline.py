"""Pipeline stages against torch.distributed.pipelining: the same blocks, cut alike, under 1F1B in the same two processes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardlib as sl
from benchmarks.model import GPT, Config, blocks_of, make_blocks, params_of, random_batch
from benchmarks.provider import ADAMW, Step
from benchmarks.report import Row, Section
from benchmarks.timing import Times, interleave, ratio

_MICROBATCHES = 8
_WIDTHS = (512, 64)
_WARM, _AGREE = 3, 1e-4
_OURS, _THEIRS = "shardlib pipeline 1F1B", "Schedule1F1B"


def measure(rounds: int) -> Section:
    """Two ranks, one thread each, one stage each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, times = [], {}
    for width in _WIDTHS:
        config = replace(Config(), width=width, batch=_MICROBATCHES)
        found = sl.launch(_rank, config, rounds, mesh={"pipe": 2}, timeout=1800)[0]
        names = {name: f"{name}, width {width}" for name in (_OURS, _THEIRS)}
        times |= {names[name]: seconds for name, seconds in found.items()}
        seconds = statistics.median(found[_OURS]), statistics.median(found[_THEIRS])
        rows.append(Row(names[_OURS], names[_THEIRS], 1.0, ratio(found[_OURS], found[_THEIRS]), seconds))
    config = Config()
    text = (
        f"One training step of a GPT ({config.layers} layers, vocabulary {config.vocab}, sequence {config.sequence}) in two "
        f"stages on two gloo ranks of one thread, {_MICROBATCHES} micro-batches of one row, 1F1B, fp32, fused AdamW. The "
        "same cut for both: embedding and the first half of the blocks, the other half and the head. "
        f"{rounds} rounds, interleaved; in the first {_WARM} steps, not timed, the losses agreed within {_AGREE:g}."
    )
    return Section("Pipeline stages", text, rows, {_OURS: "defaults", _THEIRS: "defaults"}, times)


def _rank(mesh: sl.Mesh, config: Config, rounds: int) -> Times:
    torch.set_num_threads(1)
    steps = {_OURS: _staged(config, mesh), _THEIRS: _pipelined(config, mesh.rank)}
    for number in range(_WARM):
        losses = [step(random_batch(config, number)) for step in steps.values()]
        if mesh.rank == mesh.size - 1 and abs(losses[0] - losses[1]) > _AGREE:
            raise AssertionError(f"the two train differently: losses {losses} in step {number}")

    def call(step: Step) -> Callable[[int], float]:
        return lambda number: step(random_batch(config, _WARM + number))

    return interleave({name: call(step) for name, step in steps.items()}, rounds, dist.barrier)


def _staged(config: Config, mesh: sl.Mesh) -> Step:
    loss_fn, params = sl.sequential(make_blocks(config)), blocks_of(params_of(GPT(config)))
    cut = sl.pipeline("1f1b", microbatches=_MICROBATCHES, partition="count")
    optimizer = sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
    state, train_step = sl.make_train_step(loss_fn, sl.shard(params, mesh, cut), optimizer)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"].item()

    return step


def _pipelined(config: Config, rank: int) -> Step:
    model = GPT(config)
    parts = [model.embed, *model.blocks, model.head]
    half = len(parts) // 2
    module = nn.Sequential(*(parts[:half] if rank == 0 else parts[half:]))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, _MICROBATCHES, loss_fn=lambda scores, targets: F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    )
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        tokens, targets = batch
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step

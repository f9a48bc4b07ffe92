"""What clocks cost: recorded steps against steps without a clock, in turns in the same two processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.cases.ranks import WARM, on_two_ranks
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import Times, interleave
from benchmarks.peers.gpt import SMALL, Config, random_batch
from benchmarks.peers.provider import ADAMW
from shardlib.models import gpt
from shardlib.report.profile.recording import stepped

_GPT = Config(vocab=2048, layers=6, width=256, heads=8, sequence=128, batch=2)
_RECORDED, _PLAIN = "recorded", "without a clock"
_STAGES, _TARGET = (0, 3), 1.03


def measure(setting: Setting) -> Result:
    """Two ranks, one thread each."""
    config = SMALL if setting.small else _GPT
    rows, times = [], Times()
    for stage in _STAGES:
        found = on_two_ranks(_rank, config, stage, setting.rounds, axis="data")[0]
        names = {name: f"stage {stage}, {name}" for name in found}
        times |= {names[name]: seconds for name, seconds in found.items()}
        rows.append(tables.row(times, names[_RECORDED], names[_PLAIN], _TARGET))
    about = (
        f"One training step of a GPT ({config.layers} layers, width {config.width}, vocabulary {config.vocab}, sequence "
        f"{config.sequence}, batch {config.batch} per rank), fp32, AdamW, every block recomputed, two gloo ranks of one "
        f"thread. {setting.rounds} rounds, in each of which both take one step. Recorded: clocks at the boundaries of "
        "blocks, phases and exchanges, as `sl.profile` has them."
    )
    return tables.compared("Steps with clocks", about, rows, times)


def _rank(mesh: sl.Mesh, config: Config, stage: int, rounds: int) -> Times:
    torch.set_num_threads(1)
    model = gpt.GPTConfig(config.vocab, config.layers, config.width, config.heads, config.sequence)
    params = sl.shard(gpt.init(model), mesh, sl.chain(sl.zero(stage), sl.remat()))
    state, train_step = sl.make_train_step(gpt.make_loss(model), params, sl.optim.adamw(ADAMW["lr"]))
    states: list[Any] = [state]

    def batch(number: int) -> dict[str, torch.Tensor]:
        tokens, targets = random_batch(config, number * mesh.size + mesh.rank)
        return {"tokens": tokens, "targets": targets}

    def plain(number: int) -> None:
        states.append(train_step(states.pop(), batch(number))[0])

    def recorded(number: int) -> None:
        states.append(stepped(train_step, states.pop(), batch(number))[0])

    return interleave({_RECORDED: recorded, _PLAIN: plain}, rounds, warm=WARM, barrier=dist.barrier)


CASE = Case("profile", "what recording a step costs", {CPU: 100}, measure)

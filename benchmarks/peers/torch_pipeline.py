"""torch.distributed.pipelining under 1F1B: two stages, each with half of the blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardlib as sl
from benchmarks.peers.gpt import GPT, Config
from benchmarks.peers.provider import ADAMW, Step


def make(config: Config, mesh: sl.Mesh) -> Step:
    """A micro-batch is one row of the batch."""
    model, rank = GPT(config), mesh.rank
    modules = [model.embed, *model.blocks, model.head]
    half = len(modules) // 2
    module = nn.Sequential(*(modules[:half] if rank == 0 else modules[half:]))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, config.batch, loss_fn=lambda scores, targets: F.cross_entropy(scores.flatten(0, 1), targets.flatten())
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

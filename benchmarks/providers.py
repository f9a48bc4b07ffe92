"""Shardlib's stages as providers, and the list of everything that is compared."""

from __future__ import annotations

import shardlib as sl
from benchmarks.model import GPT, Config, make_loss, params_of
from benchmarks.peers import ddp, deepspeed, fsdp
from benchmarks.provider import ADAMW, Batch, Provider, Step


def shardlib_stage(stage: int) -> Provider:
    def make(config: Config) -> Step:
        params = sl.shard(params_of(GPT(config)), sl.make_mesh(), stage=stage)
        optimizer = sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
        state, train_step = sl.make_train_step(make_loss(config), params, optimizer)

        def step(batch: Batch) -> float:
            nonlocal state
            state, metrics = train_step(state, batch)
            return metrics["loss"].item()

        return step

    return Provider(f"shardlib stage {stage}", "defaults", make)


def all_providers() -> list[Provider]:
    """Shardlib's four stages and every peer that is installed."""
    stages = [shardlib_stage(stage) for stage in range(4)]
    return [*stages, *ddp.providers(), *fsdp.providers(), *deepspeed.providers()]

"""Shardlib's stages as providers, and the list of everything that is compared."""

from __future__ import annotations

from typing import Any

import shardlib as sl
from benchmarks.model import GPT, Config, make_loss, params_of
from benchmarks.peers import ddp, deepspeed, fsdp
from benchmarks.provider import ADAMW, Batch, Provider, Step


def train_step(config: Config, params: Any, optimizer: sl.optim.GradientTransformation | None = None) -> Step:
    """Shardlib's step on plain or sharded parameters of `GPT`, by default with AdamW."""
    optimizer = optimizer or sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
    state, one_step = sl.make_train_step(make_loss(config), params, optimizer)

    def step(batch: Batch) -> float:
        nonlocal state
        state, metrics = one_step(state, batch)
        return metrics["loss"].item()

    return step


def shardlib_stage(stage: int) -> Provider:
    def make(config: Config) -> Step:
        return train_step(config, sl.shard(params_of(GPT(config)), sl.make_mesh(), stage=stage))

    return Provider(f"shardlib stage {stage}", "defaults", make)


def shardlib_alone() -> Provider:
    """What a rank computes: the step on a mesh of one, nothing exchanged."""
    return Provider("compute alone", "defaults", lambda config: train_step(config, params_of(GPT(config))))


def all_providers() -> list[Provider]:
    """Shardlib's four stages and every peer that is installed."""
    stages = [shardlib_stage(stage) for stage in range(4)]
    return [*stages, *ddp.providers(), *fsdp.providers(), *deepspeed.providers()]

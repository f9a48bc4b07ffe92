"""Shardlib's stages as providers, and the list of everything that is compared."""

from __future__ import annotations

from typing import Any

import torch

import shardlib as sl
from benchmarks.peers import ddp, deepspeed, fsdp
from benchmarks.peers.gpt import GPT, Config, make_loss, params_of
from benchmarks.peers.provider import ADAMW, Provider, Step
from shardlib.mesh.transport import EchoGroup


def adamw() -> sl.optim.GradientTransformation:
    """AdamW with the hyper-parameters of all providers."""
    return sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])


def step_of(
    loss_fn: Any, params: Any, optimizer: sl.optim.GradientTransformation | None = None, compile: bool = False
) -> Step:
    """A shardlib step on plain or sharded parameters, by default with AdamW."""
    state, train_step = sl.make_train_step(loss_fn, params, optimizer or adamw(), compile=compile)

    def step(batch: Any) -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"].item()

    return step


def shardlib_stage(stage: int) -> Provider:
    def make(config: Config) -> Step:
        return step_of(make_loss(config), sl.shard(params_of(GPT(config)), sl.make_mesh(), stage=stage))

    return Provider(f"shardlib stage {stage}", "defaults", make)


def shardlib_alone() -> Provider:
    """The step on a mesh of one: computation without communication."""
    return Provider("compute alone", "defaults", lambda config: step_of(make_loss(config), params_of(GPT(config))))


def all_providers() -> list[Provider]:
    """The four stages of shardlib, and every peer that is installed."""
    stages = [shardlib_stage(stage) for stage in range(4)]
    return [*stages, *ddp.providers(), *fsdp.providers(), *deepspeed.providers()]


def echo_mesh(ranks: int, device: torch.device) -> sl.Mesh:
    """A mesh of one rank and echoes of it, so that gathers and reductions are copies, and nothing is sent."""
    return sl.Mesh({"data": ranks}, 0, {"data": EchoGroup(ranks)}, device)

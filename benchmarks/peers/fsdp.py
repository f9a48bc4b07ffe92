"""fully_shard (FSDP2), with and without resharding after forward (ZeRO-3 and ZeRO-2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.gpt import GPT, Config
from benchmarks.peers.provider import ADAMW, Provider, Step, loop


def units(model: GPT) -> list[nn.Module]:
    """The modules that are wrapped: the embedding, each block, the head."""
    return [model.embed, *model.blocks, model.head]


def shard(model: GPT, device: str, **options: Any) -> GPT:
    """The model, sharded over all ranks."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for unit in (*units(model), model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def sharded(reshard: bool) -> Provider:
    def make(config: Config) -> Step:
        model = shard(GPT(config), "cpu", reshard_after_forward=reshard)
        return loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))

    name = "fully_shard" if reshard else "fully_shard without resharding"
    return Provider(name, "one group per block, embedding and head; fused AdamW", make)


def providers() -> list[Provider]:
    return [sharded(False), sharded(True)]

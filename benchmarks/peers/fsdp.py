"""fully_shard (FSDP2), with and without resharding after forward (ZeRO-3 and ZeRO-2)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.model import GPT, Config
from benchmarks.provider import ADAMW, Provider, Step, loop


def sharded(reshard: bool) -> Provider:
    def make(config: Config) -> Step:
        model = GPT(config)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for unit in (model.embed, *model.blocks, model.head, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        return loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))

    name = "fully_shard" if reshard else "fully_shard without resharding"
    return Provider(name, "one group per block, embedding and head; fused AdamW", make)


def providers() -> list[Provider]:
    return [sharded(False), sharded(True)]

"""DistributedDataParallel, alone and with ZeroRedundancyOptimizer (ZeRO-1).

Buckets of 10, 25 and 50 MB, a static graph or not, and parameters as views or not made no difference beyond the noise.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.gpt import GPT, Config
from benchmarks.peers.provider import ADAMW, Provider, Step, loop


def _wrapped(config: Config, bucket_mb: float, static: bool) -> DistributedDataParallel:
    return DistributedDataParallel(
        GPT(config), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=static
    )


def plain(bucket_mb: float = 25, static: bool = True, name: str = "DDP") -> Provider:
    def make(config: Config) -> Step:
        model = _wrapped(config, bucket_mb, static)
        return loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))

    return Provider(name, f"{bucket_mb:g} MB buckets as gradient views, static graph: {static}, fused AdamW", make)


def zero_redundancy(bucket_mb: float = 25, static: bool = True, views: bool = True) -> Provider:
    def make(config: Config) -> Step:
        model = _wrapped(config, bucket_mb, static)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, fused=True, **ADAMW
        )
        return loop(model, optimizer)

    setting = (
        f"{bucket_mb:g} MB buckets as gradient views, static graph: {static}, parameters as views: {views}, fused AdamW"
    )
    return Provider("DDP + ZeroRedundancyOptimizer", setting, make)


def providers() -> list[Provider]:
    return [plain(), plain(name="DDP again"), zero_redundancy()]

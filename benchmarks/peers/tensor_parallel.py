"""``parallelize_module``: a GPT whose attention works with any number of heads, sliced over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardlib as sl
from benchmarks.peers.gpt import Config, Embedding, Head, cross_entropy
from benchmarks.peers.provider import ADAMW, Step, loop


class Block(nn.Module):
    """The benchmarks' block with separate query, key and value, which reads the number of heads from its inputs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.size = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), targets)


def make(config: Config, _: sl.Mesh) -> Step:
    model = GPT(config)
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.scores": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(config.layers):
        plan |= {f"blocks.{layer}.{name}": column for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{layer}.{name}": row for name in ("out", "down")}
    model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    sliced = [p for p in model.parameters() if hasattr(p, "to_local")]
    whole = [p for p in model.parameters() if not hasattr(p, "to_local")]
    # Two groups: a fused step takes one kind of tensor at a time.
    optimizer = torch.optim.AdamW([{"params": sliced}, {"params": whole}], fused=True, **ADAMW)
    return loop(model, optimizer)

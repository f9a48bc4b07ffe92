"""Tensor slicing against torch's ``parallelize_module``: one module, trained by both in the same two processes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardlib as sl
from benchmarks.model import Config, Embedding, Head, cross_entropy, random_batch
from benchmarks.provider import ADAMW, Step, loop
from benchmarks.report import Row, Section
from benchmarks.timing import Times, interleave, ratio

_WIDTHS = {512: 1.00, 64: 0.60}
_WARM, _AGREE = 3, 1e-4
_OURS, _THEIRS = "shardlib tensor_slicing", "parallelize_module"


class Block(nn.Module):
    """The benchmarks' block with query, key and value apart; it does not know how many heads it has."""

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


_RULES: dict[str, Any] = {
    **dict.fromkeys(("blocks/*/q", "blocks/*/k", "blocks/*/v", "blocks/*/up"), "column"),
    **dict.fromkeys(("blocks/*/out", "blocks/*/down"), "row"),
    "embed/tokens": "vocab",
    "head/scores": "vocab",
}


def measure(rounds: int) -> Section:
    """Two ranks, one thread each, at each width."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, times = [], {}
    for width, target in _WIDTHS.items():
        config = replace(Config(), width=width)
        found = sl.launch(_rank, config, rounds, mesh={"model": 2}, timeout=1800)[0]
        names = {name: f"{name}, width {width}" for name in (_OURS, _THEIRS)}
        times |= {names[name]: seconds for name, seconds in found.items()}
        seconds = statistics.median(found[_OURS]), statistics.median(found[_THEIRS])
        rows.append(Row(names[_OURS], names[_THEIRS], target, ratio(found[_OURS], found[_THEIRS]), seconds))
    config = Config()
    text = (
        f"One training step of a GPT ({config.layers} layers, vocabulary {config.vocab}, sequence {config.sequence}, batch "
        f"{config.batch}), fp32, fused AdamW, sliced over two gloo ranks of one thread: attention by heads, the MLP by its "
        "inner width, embedding and output layer by words, the logits gathered. The same module for both: shardlib runs it "
        f"through from_module. {rounds} rounds, interleaved; in the first {_WARM} steps, not timed, the losses agreed within "
        f"{_AGREE:g}."
    )
    settings = {
        _OURS: "defaults",
        _THEIRS: "ColwiseParallel and RowwiseParallel, local outputs; the vocabulary's gathered",
    }
    return Section("Tensor slicing", text, rows, settings, times)


def _rank(mesh: sl.Mesh, config: Config, rounds: int) -> Times:
    torch.set_num_threads(1)
    steps = {_OURS: _sliced(config, mesh), _THEIRS: _parallelized(config)}
    for number in range(_WARM):
        losses = [step(random_batch(config, number)) for step in steps.values()]
        if abs(losses[0] - losses[1]) > _AGREE:
            raise AssertionError(f"the two train differently: losses {losses} in step {number}")

    def call(step: Step) -> Callable[[int], float]:
        return lambda number: step(random_batch(config, _WARM + number))

    return interleave({name: call(step) for name, step in steps.items()}, rounds, dist.barrier)


def _sliced(config: Config, mesh: sl.Mesh) -> Step:
    apply, params = sl.from_module(GPT(config))
    optimizer = sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
    sharded = sl.shard(params, mesh, sl.tensor_slicing(_RULES))
    state, train_step = sl.make_train_step(lambda params, batch: apply(params, *batch), sharded, optimizer)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"].item()

    return step


def _parallelized(config: Config) -> Step:
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

"""The GPT of the benchmarks, 33.7M parameters, in two forms with the same values and the same mathematics.

Peers train the module, shardlib the pure function. The pytree has the module's names, and one unit for the embedding, one per
block and one for the head, which are also the modules that peers wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    layers: int = 8
    width: int = 512
    heads: int = 8
    sequence: int = 128
    batch: int = 4  # per rank


SMALL = Config(vocab=64, layers=2, width=32, heads=2, sequence=16, batch=2)  # to see that something runs


class Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


class GPT(nn.Module):
    """``GPT(config)(tokens, targets)`` is the mean cross entropy; both arguments are (batch, sequence) int64."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.named_parameters():
                if value.dim() == 2:
                    value.normal_(std=0.02, generator=generator)
                elif name.endswith("bias"):
                    value.zero_()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), targets)


def params_of(module: GPT) -> Params:
    """The module's values as a pytree: ``{"embed": {...}, "blocks": [...], "head": {...}}``."""
    return {
        "embed": _nested(module.embed),
        "blocks": [_nested(block) for block in module.blocks],
        "head": _nested(module.head),
    }


def make_loss(config: Config, wrap: Callable[[Any], Any] = lambda part: part) -> Any:
    """``loss_fn(params, (tokens, targets))``: the forward of `GPT` as a pure function of the pytree.

    ``wrap`` is applied to the functions of the embedding, a block and the head, such as to compile them.
    """
    embed, run_block, scores = wrap(_embed), wrap(_block), wrap(_scores)

    def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = embed(params["embed"], tokens)
        for block in params["blocks"]:
            x = run_block(block, x, config.heads)
        return cross_entropy(scores(params["head"], x), targets)

    return loss_fn


def make_blocks(config: Config) -> list[Any]:
    """The loss as functions ``block(params, x, (tokens, targets))``, for `shardlib.sequential`; see `blocks_of`."""

    def embed(params: Params, _: None, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _embed(params, batch[0])

    def block(params: Params, x: Tensor, _: Any) -> Tensor:
        return _block(params, x, config.heads)

    def head(params: Params, x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(_scores(params, x), batch[1])

    return [embed, *[block] * config.layers, head]


def blocks_of(params: Params) -> list[Params]:
    """The pytree as a list with one tree for each block of `make_blocks`."""
    return [params["embed"], *params["blocks"], params["head"]]


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Causal attention: (batch, sequence, 3·width) -> (batch, sequence, width)."""
    batch, length, width = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def random_batch(config: Config, seed: int) -> tuple[Tensor, Tensor]:
    """One rank's share of a batch: tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch, config.sequence)
    tokens, targets = (torch.randint(config.vocab, shape, generator=generator) for _ in range(2))
    return tokens, targets


def _nested(module: nn.Module) -> Params:
    tree: Params = {}
    for name, value in module.named_parameters():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value.detach().clone()
    return tree


def _embed(params: Params, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, params["tokens"]["weight"]) + params["positions"]["weight"][: tokens.shape[1]]


def _block(params: Params, x: Tensor, heads: int) -> Tensor:
    x = x + _linear(params["out"], attend(_linear(params["qkv"], _norm(params["norm1"], x)), heads))
    return x + _linear(params["down"], F.gelu(_linear(params["up"], _norm(params["norm2"], x)), approximate="tanh"))


def _scores(params: Params, x: Tensor) -> Tensor:
    return F.linear(_norm(params["norm"], x), params["scores"]["weight"])


def _linear(params: Params, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def _norm(params: Params, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"])

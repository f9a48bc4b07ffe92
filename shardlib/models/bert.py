"""A BERT as pure functions of a parameter pytree (Devlin et al. 2018, arXiv 1810.04805), trained on masked tokens.

Post-norm as in the paper, or pre-norm. As in `shardlib.models.gpt`, nothing here knows of ranks, meshes or shards. The
output layer is the token embedding, without a bias of its own; there is no next-sentence loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.models.layers import Fresh, Params, check_sizes, drop, layer_norm, layer_rules, linear, self_attention
from shardlib.nn.attention import attention
from shardlib.nn.blocks import block as mark_block
from shardlib.nn.functional import Mean, embedding, linear_cross_entropy
from shardlib.nn.sequence import gather_sequence, shard_sequence
from shardlib.rng import Key, uniform
from shardlib.sparse import Layout

IGNORED = -100  # as a target: the position does not count


@dataclass(frozen=True)
class BERTConfig:
    """Sizes of a BERT.

    ``sequence`` is the longest input in tokens; ``segments`` how many kinds of them there are (the paper: the first and
    the second sentence); ``dropout`` the probability of zeroing an element of the embedding and of each residual branch;
    ``pre_norm`` normalises what goes into a branch, and once more at the end, instead of the sum after it; with a
    ``layout`` (`shardlib.sparse`, for the length of the batches) attention computes its blocks alone.

    Raises ValueError when ``heads`` does not divide ``width``, a size is below 1, ``dropout`` lies outside [0, 1), or the
    layout is causal or of other heads.
    """

    vocab: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 6
    sequence: int = 128
    segments: int = 2
    dropout: float = 0.0
    pre_norm: bool = False
    dtype: torch.dtype = torch.float32
    layout: Layout | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab", "layers", "width", "heads", "sequence", "segments")
        if self.layout is not None and self.layout.causal:
            raise ValueError("BERTConfig: BERT looks both ways, and the layout is causal: make it with causal=False")


def init(config: BERTConfig, seed: int = 0, device: str | torch.device = "cpu") -> Params:
    """Fresh parameters: weights from N(0, 0.02²), biases 0, gains 1. Values depend on ``seed`` alone, not on ``device``.

    Returns ``{"embed": {"tokens": (V, W), "positions": (S, W), "segments": (T, W), "norm"}, "blocks": [...],
    "head": {"dense", "norm", "weight": (V, W)}}``; head's weight is the token embedding itself, and ``pre_norm`` adds
    ``"last"`` to it. A block is ``{"attn": {"qkv", "out"}, "ln1", "mlp": {"up", "down"}, "ln2"}``, each (and the norms
    and "dense") a ``{"weight", "bias"}``. The rows of qkv are (heads, 3, size).
    """
    fresh, width = Fresh(config.dtype, device, seed), config.width

    def one_block() -> Params:
        return {
            "attn": {"qkv": fresh.linear(3 * width, width), "out": fresh.linear(width, width)},
            "ln1": fresh.norm(width),
            "mlp": {"up": fresh.linear(4 * width, width), "down": fresh.linear(width, 4 * width)},
            "ln2": fresh.norm(width),
        }

    tokens = fresh.normal(config.vocab, width)
    last = {"last": fresh.norm(width)} if config.pre_norm else {}
    return {
        "embed": {
            "tokens": tokens,
            "positions": fresh.normal(config.sequence, width),
            "segments": fresh.normal(config.segments, width),
            "norm": fresh.norm(width),
        },
        "blocks": [one_block() for _ in range(config.layers)],
        "head": {**last, "dense": fresh.linear(width, width), "norm": fresh.norm(width), "weight": tokens},
    }


def _block(config: BERTConfig, params: Params, x: Tensor, key_mask: Tensor | None, rng: Key | None) -> Tensor:
    """One transformer block: (B, S, W) -> (B, S, W). ``rng`` is used, and may not be None, under dropout."""

    def attend(x: Tensor) -> Tensor:
        size = config.width // config.heads
        a = self_attention(
            params["attn"], x, size, partial(attention, causal=False, key_mask=key_mask, layout=config.layout)
        )
        return drop(config.dropout, a, rng, "attn")

    def think(x: Tensor) -> Tensor:
        h = F.gelu(linear(params["mlp"]["up"], x))
        return drop(config.dropout, linear(params["mlp"]["down"], h), rng, "mlp")

    if config.pre_norm:
        x = x + attend(_norm(params["ln1"], x))
        return x + think(_norm(params["ln2"], x))
    x = _norm(params["ln1"], x + attend(x))
    return _norm(params["ln2"], x + think(x))


block = mark_block(_block)


def hidden(config: BERTConfig, params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Tensor:
    """What the last block gives: (B, S, W).

    Args:
        batch: ``{"tokens": (B, S) int64}``; with ``"mask"`` (B, S) bool, which of them are not padding; with
            ``"segments"`` (B, S) int64, which segment each belongs to, by default 0.

    Raises:
        ValueError: S is longer than ``config.sequence``.
    """
    tokens, embedded = batch["tokens"], params["embed"]
    length = tokens.shape[1]
    if length > config.sequence:
        raise ValueError(f"{length} tokens are more than the model's sequence of {config.sequence}")
    segments = batch.get("segments", torch.zeros_like(tokens))
    x = embedding(tokens, embedded["tokens"]) + shard_sequence(embedded["positions"][:length], 0)
    x = _norm(embedded["norm"], x + embedding(segments, embedded["segments"]))
    x = drop(config.dropout, x, rng, "embed")
    for i, params_i in enumerate(params["blocks"]):
        x = block(config, params_i, x, batch.get("mask"), rng.fold_in(i) if rng is not None else None)
    return _norm(params["head"]["last"], x) if config.pre_norm else x


def logits(config: BERTConfig, params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Tensor:
    """Scores of the token at every position: (B, S, V)."""
    x = _scored(params["head"], hidden(config, params, batch, rng))
    return gather_sequence(F.linear(x, params["head"]["weight"]))


def make_loss(config: BERTConfig) -> Callable[..., Mean]:
    """The training loss ``loss(params, batch, rng=None)``, in nats per token that counts, as a `Mean`.

    ``batch`` is as `hidden` takes it, with ``"targets"`` (B, S) int64: the token at each position that counts, and
    -100 at the others. ``rng`` is a ``Key``, needed only under dropout.
    """

    def loss(params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Mean:
        x = _scored(params["head"], hidden(config, params, batch, rng))
        total = linear_cross_entropy(x, params["head"]["weight"], batch["targets"], reduction="sum")
        return Mean(total, (batch["targets"] != IGNORED).sum())

    return loss


def mask_tokens(
    config: BERTConfig, tokens: Tensor, mask_token: int, rng: Key, share: float = 0.15
) -> dict[str, Tensor]:
    """A batch for `make_loss` of whole ``tokens`` (B, S) int64: the paper's masking, section 3.1.

    ``share`` of the positions count; of those 80 % become ``mask_token``, 10 % a random token, and 10 % stay.
    """
    chosen, what = (uniform(rng.fold_in(name), tokens.shape, tokens.device) for name in ("chosen", "what"))
    other = (uniform(rng.fold_in("other"), tokens.shape, tokens.device) * config.vocab).long()
    counts = chosen < share
    shown = torch.where(counts & (what < 0.8), mask_token, tokens)
    shown = torch.where(counts & (what >= 0.9), other, shown)
    return {"tokens": shown, "targets": torch.where(counts, tokens, IGNORED)}


def slicing_rules(config: BERTConfig) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing`: attention by heads, the MLP by its inner width, the embedding by words."""
    return layer_rules("blocks/*/", config.heads) | {"embed/tokens": "vocab", "head/weight": "vocab"}


def _scored(head: Params, x: Tensor) -> Tensor:
    """What the output layer scores."""
    return _norm(head["norm"], F.gelu(linear(head["dense"], x)))


def _norm(params: Params, x: Tensor) -> Tensor:
    return layer_norm(params, x, eps=1e-12)

"""A BERT as pure functions of a parameter pytree (Devlin et al. 2018, arXiv 1810.04805), trained on masked tokens.

Post-norm as in the paper, or pre-norm. As in `shardlib.models.gpt`, there is no parallel code. The output layer is the token
embedding, without a bias; there is no next-sentence loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import IllegalComposition
from shardlib.models.layers import Initial, Params, check_sizes, drop, layer_norm, layer_rules, linear, self_attention
from shardlib.nn.attention import attention
from shardlib.nn.blocks import OPEN, Gate, checkpoint_name
from shardlib.nn.blocks import block as mark_block
from shardlib.nn.functional import Mean, embedding, linear_cross_entropy
from shardlib.nn.sequence import gather_sequence, shard_sequence
from shardlib.rng import Key, uniform
from shardlib.sparse import Layout

IGNORED = -100  # the target of positions that are left out of the loss


@dataclass(frozen=True)
class BERTConfig:
    """Sizes of a BERT.

    Attributes:
        sequence: the longest input, in tokens.
        segments: the number of segments of a text (in the paper two: the first and the second sentence).
        dropout: the probability of zeroing an element of the embedding and of each residual branch.
        pre_norm: whether the input of each branch is normalised, and the last output, instead of the sum after a branch.
        layout: attention computes only the blocks of this `shardlib.sparse` layout, made for the length of the batches.

    Raises:
        ValueError: ``heads`` does not divide ``width``, a size is below 1, ``dropout`` lies outside [0, 1), or the layout
            is causal or has another number of heads.
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
            raise ValueError("BERTConfig: the layout is causal, and BERT is not; make it with causal=False")


def init(config: BERTConfig, seed: int = 0, device: str | torch.device = "cpu") -> Params:
    """Initial parameters: weights from N(0, 0.02²), biases 0, gains 1. Values depend on ``seed`` alone, not on ``device``.

    Returns ``{"embed": {"tokens": (V, W), "positions": (S, W), "segments": (T, W), "norm"}, "blocks": [...],
    "head": {"dense", "norm", "weight": (V, W)}}``. The weight of "head" is the token embedding itself; ``pre_norm`` adds a
    norm ``"last"`` to "head". A block is ``{"attn": {"qkv", "out"}, "ln1", "mlp": {"up", "down"}, "ln2"}``. Linear layers
    and norms are ``{"weight", "bias"}``. The rows of qkv are (heads, 3, size).
    """
    initial, width = Initial(config.dtype, device, seed), config.width

    def one_block() -> Params:
        return {
            "attn": {"qkv": initial.linear(3 * width, width), "out": initial.linear(width, width)},
            "ln1": initial.norm(width),
            "mlp": {"up": initial.linear(4 * width, width), "down": initial.linear(width, 4 * width)},
            "ln2": initial.norm(width),
        }

    tokens = initial.normal(config.vocab, width)
    last = {"last": initial.norm(width)} if config.pre_norm else {}
    return {
        "embed": {
            "tokens": tokens,
            "positions": initial.normal(config.sequence, width),
            "segments": initial.normal(config.segments, width),
            "norm": initial.norm(width),
        },
        "blocks": [one_block() for _ in range(config.layers)],
        "head": {**last, "dense": initial.linear(width, width), "norm": initial.norm(width), "weight": tokens},
    }


def _block(
    config: BERTConfig, params: Params, x: Tensor, key_mask: Tensor | None, rng: Key | None, gate: Gate = OPEN
) -> Tensor:
    """One transformer block: (B, S, W) -> (B, S, W). Dropout needs ``rng``."""
    if gate.keep is not None and not config.pre_norm:
        raise IllegalComposition(
            "progressive_layer_drop leaves out layers, and in a post-norm BERT the residual stream goes through their norms; "
            "use BERTConfig(pre_norm=True)"
        )
    if not gate.open:
        return x

    def attend(x: Tensor) -> Tensor:
        size = config.width // config.heads
        a = self_attention(
            params["attn"], x, size, partial(attention, causal=False, key_mask=key_mask, layout=config.layout)
        )
        return drop(config.dropout, checkpoint_name(a, "attn/out"), rng, "attn")

    def think(x: Tensor) -> Tensor:
        h = F.gelu(checkpoint_name(linear(params["mlp"]["up"], x), "mlp/hidden"))
        return drop(config.dropout, linear(params["mlp"]["down"], h), rng, "mlp")

    if config.pre_norm:
        x = x + gate.scaled(attend(_norm(params["ln1"], x)))
        return x + gate.scaled(think(_norm(params["ln2"], x)))
    x = _norm(params["ln1"], x + attend(x))
    return _norm(params["ln2"], x + think(x))


block: Callable[..., torch.Tensor] = mark_block(_block)


def hidden(config: BERTConfig, params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Tensor:
    """The output of the last block, (B, S, W).

    Args:
        batch: ``{"tokens": (B, S) int64}``; optionally ``"mask"`` (B, S) bool, False for padding, and ``"segments"`` (B, S)
            int64, the segment of each token, by default 0.

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
    """Logits of the token at every position, (B, S, V)."""
    x = _output_input(params["head"], hidden(config, params, batch, rng))
    return gather_sequence(F.linear(x, params["head"]["weight"]))


def make_loss(config: BERTConfig) -> Callable[..., Mean]:
    """The training loss ``loss(params, batch, rng=None)``, in nats per token with a target, as a `Mean`.

    ``batch`` is that of `hidden` with ``"targets"`` (B, S) int64: a token, or -100 for positions that are left out of the
    loss. Dropout needs ``rng``, a `Key`.
    """

    def loss(params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Mean:
        x = _output_input(params["head"], hidden(config, params, batch, rng))
        total = linear_cross_entropy(x, params["head"]["weight"], batch["targets"], reduction="sum")
        return Mean(total, (batch["targets"] != IGNORED).sum())

    return loss


def mask_tokens(
    config: BERTConfig, tokens: Tensor, mask_token: int, rng: Key, share: float = 0.15
) -> dict[str, Tensor]:
    """A batch for `make_loss` from unmasked ``tokens`` (B, S) int64, by the masking of the paper, section 3.1.

    A ``share`` of the positions get targets; of these 80 % become ``mask_token``, 10 % a random token, and 10 % stay.
    """
    chosen, action = (uniform(rng.fold_in(name), tokens.shape, tokens.device) for name in ("chosen", "what"))
    random = (uniform(rng.fold_in("other"), tokens.shape, tokens.device) * config.vocab).long()
    has_target = chosen < share
    masked = torch.where(has_target & (action < 0.8), mask_token, tokens)
    masked = torch.where(has_target & (action >= 0.9), random, masked)
    return {"tokens": masked, "targets": torch.where(has_target, tokens, IGNORED)}


def slicing_rules(config: BERTConfig) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing`: attention by heads, the MLP by its inner width, the embedding by tokens."""
    return layer_rules("blocks/*/", config.heads) | {"embed/tokens": "vocab", "head/weight": "vocab"}


def _output_input(head: Params, x: Tensor) -> Tensor:
    """The input of the output layer, from that of the head."""
    return _norm(head["norm"], F.gelu(linear(head["dense"], x)))


def _norm(params: Params, x: Tensor) -> Tensor:
    return layer_norm(params, x, eps=1e-12)

"""A GPT as pure functions of a parameter pytree (pre-norm, learned positions; Radford et al. 2019, GPT-2).

There is no parallel code. With `shardlib.sequence`, activations hold this rank's part of the S positions, whereas logits and
losses are those of the whole sequence. Weights are (out, in), as in ``F.linear``, and everything is computed in the dtype of
the parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.models.layers import Fresh, Params, check_sizes, drop, layer_norm, layer_rules, linear, self_attention
from shardlib.nn.attention import attention
from shardlib.nn.blocks import Sequential, sequential
from shardlib.nn.blocks import block as mark_block
from shardlib.nn.functional import Mean, embedding, linear_cross_entropy
from shardlib.nn.names import checkpoint_name
from shardlib.nn.sequence import gather_sequence, shard_sequence
from shardlib.rng import Key
from shardlib.sparse import Layout

# ``attend(q, k, v, layout=...)``, (B, heads, S, size) each: the attention of a layer.
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        sequence: the longest context, in tokens.
        dropout: the probability of zeroing an element of the embedding and of each residual branch.
        tie: whether the token embedding is also the output layer.
        layout: attention computes only the blocks of this `shardlib.sparse` layout, made for the length of the batches.

    Raises:
        ValueError: ``heads`` does not divide ``width``, a size is below 1, ``dropout`` lies outside [0, 1), or the layout
            has another number of heads.
    """

    vocab: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 6
    sequence: int = 128
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    tie: bool = False
    layout: Layout | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab", "layers", "width", "heads", "sequence")


def init(config: GPTConfig, seed: int = 0, device: str | torch.device = "cpu") -> Params:
    """Initial parameters: weights from N(0, 0.02²), biases 0, gains 1.

    The two weights of a block that write to the residual stream are scaled by 1/√(2·layers), so that the stream's
    variance does not grow with depth. Values depend on ``seed`` alone, not on ``device``.

    Returns ``{"embed": {"tokens": (V, W), "positions": (S, W)}, "blocks": [...], "head": {"norm", "weight": (V, W)}}``.
    With ``config.tie`` the weight of "head" is the token embedding itself. A block is ``{"ln1", "attn": {"qkv", "out"},
    "ln2", "mlp": {"up", "down"}}``. Linear layers and norms are ``{"weight", "bias"}``. The rows of qkv are (heads, 3, size).
    """
    fresh = Fresh(config.dtype, device, seed)
    width, residual_std = config.width, 0.02 / math.sqrt(2 * config.layers)

    def one_block() -> Params:
        return {
            "ln1": fresh.norm(width),
            "attn": {"qkv": fresh.linear(3 * width, width), "out": fresh.linear(width, width, residual_std)},
            "ln2": fresh.norm(width),
            "mlp": {"up": fresh.linear(4 * width, width), "down": fresh.linear(width, 4 * width, residual_std)},
        }

    tokens = fresh.normal(config.vocab, width)
    return {
        "embed": {"tokens": tokens, "positions": fresh.normal(config.sequence, width)},
        "blocks": [one_block() for _ in range(config.layers)],
        "head": {"norm": fresh.norm(width), "weight": tokens if config.tie else fresh.normal(config.vocab, width)},
    }


def _block(
    config: GPTConfig,
    params: Params,
    x: Tensor,
    rng: Key | None,
    attend: Attend | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """One transformer block: (B, S, W) -> (B, S, W). Dropout needs ``rng``."""
    size = config.width // config.heads
    attend = attend or partial(attention, causal=True, segments=segments)
    a = self_attention(params["attn"], layer_norm(params["ln1"], x), size, partial(attend, layout=config.layout))
    x = x + drop(config.dropout, checkpoint_name(a, "attn/out"), rng, "attn")
    h = checkpoint_name(linear(params["mlp"]["up"], layer_norm(params["ln2"], x)), "mlp/hidden")
    h = F.gelu(h, approximate="tanh")
    return x + drop(config.dropout, linear(params["mlp"]["down"], h), rng, "mlp")


block = mark_block(_block)


def embed(
    config: GPTConfig,
    params: Params,
    tokens: Tensor,
    rng: Key | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The residual stream before the first block: tokens (B, S) int64 -> (B, S, W).

    The tokens stand at ``positions``, (B, S) int64 below ``config.sequence``, or one after the other from 0 on.

    Raises:
        ValueError: more tokens than ``config.sequence``, without ``positions``.
    """
    length, table = tokens.shape[1], params["embed"]["positions"]
    if positions is None and length > config.sequence:
        raise ValueError(f"{length} tokens are more than the model's sequence of {config.sequence}")
    places = shard_sequence(table[:length], 0) if positions is None else embedding(positions, table)
    return drop(config.dropout, embedding(tokens, params["embed"]["tokens"]) + places, rng, "embed")


def hidden(
    config: GPTConfig,
    params: Params,
    tokens: Tensor,
    rng: Key | None = None,
    attend: Callable[[int], Attend] | None = None,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The input of the output layer: tokens (B, S) int64 -> (B, S, W).

    ``attend`` gives the attention of each layer in place of causal attention among the tokens: to a cache. ``segments`` and
    ``positions`` (B, S) are those of packed documents.
    """
    x = embed(config, params, tokens, rng, positions)
    for i, params_i in enumerate(params["blocks"]):
        key = rng.fold_in(i) if rng is not None else None
        x = block(config, params_i, x, key, None if attend is None else attend(i), segments)
    return layer_norm(params["head"]["norm"], x)


def logits(config: GPTConfig, params: Params, tokens: Tensor, rng: Key | None = None) -> Tensor:
    """Logits of the next token at every position: tokens (B, S) int64 -> (B, S, V)."""
    return gather_sequence(F.linear(hidden(config, params, tokens, rng), params["head"]["weight"]))


def make_loss(config: GPTConfig) -> Callable[..., Any]:
    """The training loss ``loss(params, batch, rng=None) -> ()``, in nats per token.

    ``batch`` is ``{"tokens": (B, S), "targets": (B, S)}``, both int64; the loss is the cross entropy of the targets,
    averaged over B·S. Dropout needs ``rng``, a `Key`.

    Batches of packed documents (`sl.data.packed`) also have ``"segments"``, whose positions see only each other, and
    ``"positions"``, both (B, S). Targets of -100 are then left out, and the loss is a `Mean` over the others.
    """

    def loss(params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Any:
        segments, positions = batch.get("segments"), batch.get("positions")
        x = hidden(config, params, batch["tokens"], rng, segments=segments, positions=positions)
        return _scores(x, params["head"]["weight"], batch)

    return loss


def _scores(x: Tensor, weight: Tensor, batch: dict[str, Tensor]) -> Any:
    """The loss of the last hidden states x (B, S, W)."""
    targets = batch["targets"]
    if "segments" not in batch:
        return linear_cross_entropy(x, weight, targets)
    return Mean(linear_cross_entropy(x, weight, targets, reduction="sum"), (targets != -100).sum())


def to_blocks(params: Params) -> list[Params]:
    """The parameters of `init` as a list for `make_sequential`: embedding, one tree per layer, head."""
    return [params["embed"], *params["blocks"], params["head"]]


def from_blocks(blocks: list[Params]) -> Params:
    """The inverse of `to_blocks`."""
    return {"embed": blocks[0], "blocks": blocks[1:-1], "head": blocks[-1]}


def make_sequential(config: GPTConfig) -> Sequential:
    """`make_loss` as an `shardlib.sequential` over `to_blocks`, which `shardlib.pipeline` can cut into stages."""

    def first(params: Params, _: None, batch: dict[str, Tensor], rng: Key | None = None) -> Tensor:
        return embed(config, {"embed": params}, batch["tokens"], rng, positions=batch.get("positions"))

    def layer(params: Params, x: Tensor, batch: dict[str, Tensor], rng: Key | None = None) -> Tensor:
        return _block(config, params, x, rng, segments=batch.get("segments"))

    def last(params: Params, x: Tensor, batch: dict[str, Tensor]) -> Any:
        return _scores(layer_norm(params["norm"], x), params["weight"], batch)

    return sequential([first, *[layer] * config.layers, last])


def slicing_rules(config: GPTConfig, blocks: bool = False) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing`: attention by heads, the MLP by its inner width, both embeddings by tokens.

    Args:
        blocks: whether the rules are for parameters that `to_blocks` made.
    """
    first, layers, last = ("0", "*", config.layers + 1) if blocks else ("embed", "blocks/*", "head")
    return layer_rules(f"{layers}/", config.heads) | {f"{first}/tokens": "vocab", f"{last}/weight": "vocab"}


def parameters_count(config: GPTConfig) -> int:
    """The number of elements of ``init(config)``; tied embeddings count once."""
    w = config.width
    per_block = 12 * w * w + 13 * w  # qkv 3, out 1, up 4, down 4 squares; their biases 9 and two norms 4
    embeddings = (config.vocab * (1 if config.tie else 2) + config.sequence) * w
    return config.layers * per_block + embeddings + 2 * w

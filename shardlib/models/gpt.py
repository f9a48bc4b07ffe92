"""A GPT as pure functions of a parameter pytree (pre-norm, learned positions; Radford et al. 2019, GPT-2).

There is no parallel code. With `shardlib.sequence`, activations hold this rank's part of the S positions, whereas logits and
losses are those of the whole sequence. Weights are (out, in), as in ``F.linear``, and everything is computed in the dtype of
the parameters.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.models.experts import Experts, Routed, moved, shift_of, with_losses
from shardlib.models.layers import Initial, Params, check_sizes, drop, layer_norm, layer_rules, linear, self_attention
from shardlib.nn.attention import attention
from shardlib.nn.blocks import OPEN, Gate, Sequential, checkpoint_name, sequential
from shardlib.nn.blocks import block as mark_block
from shardlib.nn.functional import Mean, embedding, linear_cross_entropy
from shardlib.nn.sequence import gather_sequence, shard_sequence
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.sparse import Layout
from shardlib.tree import Tree, leaves_of

# ``attend(q, k, v, layout=...)``, (B, heads, S, size) each: the attention of a layer.
Attend = Callable[..., Tensor]
Layers = tuple[Routed | None, ...]  # what the layers so far say beside the residual stream: those with experts


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        sequence: the longest context, in tokens.
        dropout: the probability of zeroing an element of the embedding and of each residual branch.
        tie: whether the token embedding is also the output layer.
        layout: attention computes only the blocks of this `shardlib.sparse` layout, made for the length of the batches.
        moe: `Experts` in place of the MLPs of some layers.

    Raises:
        ValueError: ``heads`` does not divide ``width``, a size is below 1, ``dropout`` lies outside [0, 1), the layout has
            another number of heads, or ``moe`` is a pattern of another number of layers.
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
    moe: Experts | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab", "layers", "width", "heads", "sequence")
        if self.moe is not None and self.layers % len(self.moe.per_layer):
            raise ValueError(
                f"GPTConfig: moe.per_layer={self.moe.per_layer} does not divide layers={self.layers}; give each a number"
            )

    def experts_of(self, layer: int) -> int:
        """The number of experts of a layer; 0 where it has an MLP."""
        return 0 if self.moe is None else self.moe.of_layer(layer)


def init(config: GPTConfig, seed: int = 0, device: str | torch.device = "cpu") -> Params:
    """Initial parameters: weights from N(0, 0.02²), biases 0, gains 1.

    The two weights of a block that write to the residual stream are scaled by 1/√(2·layers), so that the stream's
    variance does not grow with depth. Values depend on ``seed`` alone, not on ``device``.

    Returns ``{"embed": {"tokens": (V, W), "positions": (S, W)}, "blocks": [...], "head": {"norm", "weight": (V, W)}}``.
    With ``config.tie`` the weight of "head" is the token embedding itself. A block is ``{"ln1", "attn": {"qkv", "out"},
    "ln2", "mlp": {"up", "down"}}``, and with experts it has in place of "mlp" a "moe" as `shardlib.nn.init_moe` makes it.
    Linear layers and norms are ``{"weight", "bias"}``. The rows of qkv are (heads, 3, size).
    """
    initial = Initial(config.dtype, device, seed)
    width, residual_std = config.width, 0.02 / math.sqrt(2 * config.layers)

    def one_block(layer: int) -> Params:
        params = {
            "ln1": initial.norm(width),
            "attn": {"qkv": initial.linear(3 * width, width), "out": initial.linear(width, width, residual_std)},
            "ln2": initial.norm(width),
        }
        if config.moe is None or not config.experts_of(layer):
            mlp = {"up": initial.linear(4 * width, width), "down": initial.linear(width, 4 * width, residual_std)}
            return params | {"mlp": mlp}
        key, how = Key(seed).fold_in(f"blocks/{layer}/moe"), {"dtype": config.dtype, "device": device}
        return params | {"moe": config.moe.init(key, layer, width, 4 * width, out_std=residual_std, **how)}

    tokens = initial.normal(config.vocab, width)
    return {
        "embed": {"tokens": tokens, "positions": initial.normal(config.sequence, width)},
        "blocks": [one_block(layer) for layer in range(config.layers)],
        "head": {"norm": initial.norm(width), "weight": tokens if config.tie else initial.normal(config.vocab, width)},
    }


def _block(
    config: GPTConfig,
    params: Params,
    x: Tensor,
    rng: Key | None,
    attend: Attend | None = None,
    segments: Tensor | None = None,
    gate: Gate = OPEN,
) -> tuple[Tensor, Routed | None]:
    """One transformer block: (B, S, W) -> (B, S, W), and what its experts say. Dropout needs ``rng``."""
    if not gate.open:
        return x, None
    size = config.width // config.heads
    attend = attend or partial(attention, causal=True, segments=segments)
    a = self_attention(params["attn"], layer_norm(params["ln1"], x), size, partial(attend, layout=config.layout))
    x = x + gate.scaled(drop(config.dropout, checkpoint_name(a, "attn/out"), rng, "attn"))
    h, routed = layer_norm(params["ln2"], x), None
    if config.moe is not None and "moe" in params:
        y, routed = config.moe(params["moe"], h, rng, segments)
    else:
        y = _mlp(params["mlp"], h)
    return x + gate.scaled(drop(config.dropout, y, rng, "mlp")), routed


def _mlp(params: Params, x: Tensor) -> Tensor:
    hidden = checkpoint_name(linear(params["up"], x), "mlp/hidden")
    return linear(params["down"], F.gelu(hidden, approximate="tanh"))


block: Callable[..., tuple[Tensor, Routed | None]] = mark_block(_block)


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
    return hidden_and_layers(config, params, tokens, rng, attend, segments, positions)[0]


def hidden_and_layers(
    config: GPTConfig,
    params: Params,
    tokens: Tensor,
    rng: Key | None,
    attend: Callable[[int], Attend] | None = None,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Layers]:
    """`hidden`, and what layers with experts say beside it."""
    x, layers = embed(config, params, tokens, rng, positions), []
    for i, params_i in enumerate(params["blocks"]):
        key = rng.fold_in(i) if rng is not None else None
        x, routed = block(config, params_i, x, key, None if attend is None else attend(i), segments)
        layers.append(routed)
    return layer_norm(params["head"]["norm"], x), tuple(layers)


def logits(config: GPTConfig, params: Params, tokens: Tensor, rng: Key | None = None) -> Tensor:
    """Logits of the next token at every position: tokens (B, S) int64 -> (B, S, V)."""
    return gather_sequence(F.linear(hidden(config, params, tokens, rng), params["head"]["weight"]))


def make_loss(config: GPTConfig) -> Callable[..., Any]:
    """The training loss ``loss(params, batch, rng=None) -> ()``, in nats per token.

    ``batch`` is ``{"tokens": (B, S), "targets": (B, S)}``, both int64; the loss is the cross entropy of the targets,
    averaged over B·S. Dropout needs ``rng``, a `Key`.

    Batches of packed documents (`sl.data.packed`) also have ``"segments"``, whose positions see only each other, and
    ``"positions"``, both (B, S). Targets of -100 are then left out, and the loss is a `Mean` over the others.

    With experts the loss is ``(loss, aux)``: the auxiliary losses are added, and ``aux["experts"][layer]`` has the numbers
    "load", "z", "entropy" and "dropped" (`shardlib.nn.routers.Routing`), and in "shares" the share of the assignments that
    each expert got. Padding is sent to no expert.
    """

    def loss(params: Params, batch: dict[str, Tensor], rng: Key | None = None) -> Any:
        segments, positions = batch.get("segments"), batch.get("positions")
        x, layers = hidden_and_layers(config, params, batch["tokens"], rng, segments=segments, positions=positions)
        return scored(config, x, layers, params["head"]["weight"], batch)

    return loss


def scored(config: GPTConfig, x: Tensor, layers: Layers, weight: Tensor, batch: dict[str, Tensor]) -> Any:
    """The loss of `hidden_and_layers` by the output layer's ``weight``, in the form of `make_loss`."""
    targets = batch["targets"]
    if "segments" not in batch:
        loss: Any = linear_cross_entropy(x, weight, targets)
    else:
        loss = Mean(linear_cross_entropy(x, weight, targets, reduction="sum"), (targets != -100).sum())
    return loss if config.moe is None else with_losses(config.moe, loss, layers)


def to_blocks(params: Params) -> list[Params]:
    """The parameters of `init` as a list for `make_sequential`: embedding, one tree per layer, head."""
    return [params["embed"], *params["blocks"], params["head"]]


def from_blocks(blocks: list[Params]) -> Params:
    """The inverse of `to_blocks`."""
    return {"embed": blocks[0], "blocks": blocks[1:-1], "head": blocks[-1]}


def make_sequential(config: GPTConfig) -> Sequential:
    """`make_loss` as an `shardlib.sequential` over `to_blocks`, which `shardlib.pipeline` can cut into stages.

    The carry is the residual stream; in a model with experts a pair of it and of what its layers so far say beside it.
    """
    Carry = Tensor | tuple[Tensor, Layers]

    def closed(x: Tensor, layers: Layers) -> Carry:
        return x if config.moe is None else (x, layers)

    def opened(carry: Any) -> tuple[Tensor, Layers]:
        return (carry, ()) if config.moe is None else carry

    def first(params: Params, _: None, batch: dict[str, Tensor], rng: Key | None = None) -> Carry:
        return closed(embed(config, {"embed": params}, batch["tokens"], rng, positions=batch.get("positions")), ())

    def layer(
        params: Params, carry: Carry, batch: dict[str, Tensor], rng: Key | None = None, gate: Gate = OPEN
    ) -> Carry:
        x, layers = opened(carry)
        x, routed = _block(config, params, x, rng, segments=batch.get("segments"), gate=gate)
        return closed(x, (*layers, routed))

    def last(params: Params, carry: Carry, batch: dict[str, Tensor]) -> Any:
        x, layers = opened(carry)
        return scored(config, layer_norm(params["norm"], x), layers, params["weight"], batch)

    return sequential([first, *[layer] * config.layers, last])


def balanced(params: Tree, experts: Mapping[str, Any], rate: float = 1e-3) -> Tree:
    """Parameters whose routers' biases are those of the next step (`shardlib.nn.routers.balanced`), for a model with balance.

    ``state = sl.replace_params(state, gpt.balanced(state.params, metrics["aux"]["experts"]))`` after a step, on every rank.

    Args:
        params: of `init` or `to_blocks`, or `Sharded`.
        experts: the metrics of the step.

    >>> from shardlib.models import gpt
    >>> router = sl.nn.MoEConfig(sl.nn.routers.top_k(1), "gelu_tanh")
    >>> config = gpt.GPTConfig(layers=1, width=16, heads=2, moe=gpt.Experts((2,), router, balance=True))
    >>> params = gpt.balanced(gpt.init(config), {"0": {"shares": [0.75, 0.25]}}, rate=0.5)
    >>> params["blocks"][0]["moe"]["router"]["balance"]
    tensor([-0.5000,  0.5000])
    """
    blocks = isinstance(params.tree if isinstance(params, Sharded) else params, list)
    prefix, first = ("", 1) if blocks else ("blocks/", 0)
    shifts = {
        f"{prefix}{int(layer) + first}/moe/router/balance": shift_of(numbers["shares"], rate)
        for layer, numbers in experts.items()
    }
    return moved(params, shifts)


def slicing_rules(config: GPTConfig, blocks: bool = False) -> dict[str, Any]:
    """Rules for `shardlib.tensor_slicing`: attention by heads, MLP and experts by inner width, both embeddings by tokens.

    Args:
        blocks: whether the rules are for parameters that `to_blocks` made.
    """
    first, layers, last = ("0", "*", config.layers + 1) if blocks else ("embed", "blocks/*", "head")
    rules = layer_rules(f"{layers}/", config.heads) | {f"{first}/tokens": "vocab", f"{last}/weight": "vocab"}
    if config.moe is not None:
        rules |= config.moe.slicing_rules(f"{layers}/moe/")
    has_mlp = not all(map(config.experts_of, range(config.layers)))
    return rules if has_mlp else {glob: style for glob, style in rules.items() if "/mlp/" not in glob}


def parameters_count(config: GPTConfig) -> int:
    """The number of elements of ``init(config)``; tied embeddings count once."""
    return sum({id(leaf): leaf.numel() for leaf in leaves_of(init(config, device="meta"))}.values())

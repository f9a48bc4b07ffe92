"""The operations of a transformer's layer, each by the library's kernel and in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from shardlib.kernels.dropout import DropoutDraw, dropout
from shardlib.kernels.gelu import gelu
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy
from shardlib.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardlib.kernels.rotary import angles, rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu
from shardlib.models.transformer_layer import LayerConfig, init, transformer_layer
from shardlib.rng import Key

Function = Callable[..., Any]


class Sizes(NamedTuple):
    """Sizes of a layer, and of the output layer with its loss.

    Attributes:
        tokens: rows of all tensors; whole sequences of ``sequence``.
        inner: an MLP's width.
        scores: heads whose attention scores a softmax takes.
        padded: positions at the end of a sequence that a softmax leaves out.
        loss: tokens, width and words of the output layer.
    """

    tokens: int
    width: int
    inner: int
    heads: int
    sequence: int
    scores: int
    padded: int
    loss: tuple[int, int, int]
    dropout: float


class Operation(NamedTuple):
    """One operation, by the library's kernel and in plain torch.

    Attributes:
        inputs: of both functions; floating-point ones have gradients.
        ours: takes ``using`` too, but where ``moved`` is None.
        moved: how many tensors like the first input must be moved at least, forward and backward; None where products
            bind it, not memory.
    """

    inputs: tuple[torch.Tensor, ...]
    kernel: Function
    plain: Function
    moved: tuple[int, int] | None


def operations(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> dict[str, Operation]:
    """All operations by name, with the same values on every device."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    x, residual, w, b = (drawn(*shape) for shape in [(sizes.tokens, sizes.width)] * 2 + [(sizes.width,)] * 2)
    inner, gate = (drawn(sizes.tokens, sizes.inner) for _ in range(2))
    batch, length = sizes.tokens // sizes.sequence, sizes.sequence
    cos, sin = angles(torch.arange(length, device=device), sizes.width // sizes.heads)
    lengths = torch.full((batch,), length - sizes.padded, device=device) if sizes.padded else None
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    if lengths is not None:
        hidden = hidden | (torch.arange(length, device=device) >= lengths[:, None, None, None])
    tokens, width, words = sizes.loss
    targets = torch.randint(0, words, (tokens,), generator=generator).to(device)
    draw, wide = DropoutDraw(sizes.dropout, 7), (sizes.width,)

    def sum_then(function: Function, x: torch.Tensor, r: torch.Tensor, *weights: torch.Tensor) -> Any:
        total = x + r
        return function(total, *weights), total

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, wide, w, b)

    def root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, wide, w, 1e-6)

    def plain_rotary(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        c, s = (torch.cat([half, half], -1).to(x.dtype) for half in (cos, sin))
        return x * c + torch.cat([-second, first], -1) * s

    def plain_softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.125).masked_fill(hidden, -torch.inf), -1)

    return {
        "LayerNorm": Operation((x, w, b), layer_norm, norm, (2, 3)),
        "RMSNorm": Operation((x, w), rms_norm, root, (2, 3)),
        "residual + LayerNorm": Operation((x, residual, w, b), add_layer_norm, partial(sum_then, norm), (4, 4)),
        "residual + RMSNorm": Operation((x, residual, w), add_rms_norm, partial(sum_then, root), (4, 4)),
        "bias + GeLU": Operation((inner, drawn(sizes.inner)), gelu, lambda x, b: F.gelu(x + b), (2, 3)),
        "bias + GeLU, tanh": Operation(
            (inner, drawn(sizes.inner)),
            partial(gelu, approximate="tanh"),
            lambda x, b: F.gelu(x + b, approximate="tanh"),
            (2, 3),
        ),
        "SwiGLU": Operation((inner, gate), swiglu, lambda g, u: F.silu(g) * u, (3, 5)),
        "bias + dropout + residual": Operation(
            (x, b, residual),
            lambda x, b, r, **using: dropout(x, draw, bias=b, residual=r, **using),
            lambda x, b, r: r + F.dropout(x + b, sizes.dropout),
            (3, 2),
        ),
        f"softmax, causal{', padded' * bool(sizes.padded)}": Operation(
            (drawn(batch, sizes.scores, length, length),),
            partial(softmax, lengths=lengths, causal=True, scale=0.125),
            plain_softmax,
            (2, 3),
        ),
        "rotary": Operation(
            (drawn(batch, sizes.heads, length, sizes.width // sizes.heads),),
            lambda x, **using: rotary(x, cos, sin, **using),
            plain_rotary,
            (2, 2),
        ),
        "linear cross-entropy": Operation(
            (drawn(tokens, width), drawn(words, width) * 0.02),
            lambda x, w: linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets),
            None,
        ),
    }


def layer(sizes: Sizes, dtype: torch.dtype) -> Operation:
    """A whole layer of BERT on the CPU, with sequences a quarter as long."""
    config = LayerConfig(
        sizes.width, sizes.heads, norm="post", dropout=sizes.dropout, attention_dropout=sizes.dropout, dtype=dtype
    )
    leaves, tree = pytree.tree_flatten(init(config))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, sizes.tokens // 16, sizes.width, generator=generator).to(dtype)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, sizes.dropout)

    def linear(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, p["weight"], p["bias"])

    def norm(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (sizes.width,), p["weight"], p["bias"])

    def ours(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        return transformer_layer(config, pytree.tree_unflatten(leaves, tree), x, Key(1))

    def plain(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        p = pytree.tree_unflatten(leaves, tree)
        q, k, v = linear(p["attn"]["qkv"], x).unflatten(-1, (sizes.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = drop(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1))
        x = norm(p["ln1"], x + drop(linear(p["attn"]["out"], (seen @ v).transpose(1, 2).flatten(2))))
        return norm(p["ln2"], x + drop(linear(p["mlp"]["down"], F.gelu(linear(p["mlp"]["up"], x)))))

    return Operation((x, *leaves), ours, plain, None)

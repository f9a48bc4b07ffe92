"""The pieces of a dense transformer layer on one core, forward and with backward, against eager torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.report import Row, Section
from benchmarks.timing import interleave, ratio
from shardlib.kernels.dropout import Draw, dropout
from shardlib.kernels.gelu import gelu
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy
from shardlib.kernels.norm import add_layer_norm, add_rms_norm, layer_norm
from shardlib.kernels.rotary import angles, rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu
from shardlib.models.transformer_layer import LayerConfig, init, transformer_layer
from shardlib.rng import Key

_TOKENS, _WIDTH, _HEADS, _SEQUENCE, _WORDS = 2048, 1024, 16, 512, 8192
_DRAW, _P = Draw(0.1, 7), 0.1


class _Piece(NamedTuple):
    inputs: tuple[torch.Tensor, ...]
    ours: Callable[..., Any]
    eager: Callable[..., Any]


def measure(rounds: int) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, times = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, piece in _pieces(dtype).items():
            found = _times(f"{name}, {str(dtype)[6:]}", piece, rounds)
            times |= found
            mine, forward, eager, eager_forward = found  # names, in this order
            for ours, theirs in ((forward, eager_forward), (mine, eager)):
                seconds = statistics.median(found[ours]), statistics.median(found[theirs])
                rows.append(Row(ours, "eager torch", 1.0, ratio(found[ours], found[theirs]), seconds))
    torch.set_num_threads(threads)
    text = (
        f"{_TOKENS:,} tokens of width {_WIDTH}, MLPs of {4 * _WIDTH}, attention of {_HEADS} heads over sequences of "
        f"{_SEQUENCE}, {_WORDS:,} words; one thread, {rounds} rounds. Eager torch draws dropout from its own generator."
    )
    return Section("Kernels of a dense layer", text, rows, times=times)


def _times(name: str, piece: _Piece, rounds: int) -> dict[str, list[float]]:
    leaves = [value.requires_grad_() for value in piece.inputs]
    shapes = piece.ours(*leaves)
    cotangents = [torch.randn_like(y) for y in (shapes if isinstance(shapes, tuple) else (shapes,))]

    def both(function: Callable[..., Any]) -> Any:
        found = function(*leaves)
        return torch.autograd.grad(found, leaves, cotangents if isinstance(found, tuple) else cotangents[0])

    def forward(function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return function(*leaves)

    calls: dict[str, Callable[[int], Any]] = {
        f"{name}, forward and backward": lambda _: both(piece.ours),
        f"{name}, forward": lambda _: forward(piece.ours),
        f"{name}, eager, forward and backward": lambda _: both(piece.eager),
        f"{name}, eager, forward": lambda _: forward(piece.eager),
    }
    for call in calls.values():
        call(0)
    return interleave(calls, rounds)


def _pieces(dtype: torch.dtype) -> dict[str, _Piece]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, residual, w, b = drawn(_TOKENS, _WIDTH), drawn(_TOKENS, _WIDTH), drawn(_WIDTH), drawn(_WIDTH)
    inner, inner_b = drawn(_TOKENS, 4 * _WIDTH), drawn(4 * _WIDTH)
    scores = drawn(_TOKENS // _SEQUENCE, _HEADS, _SEQUENCE, _SEQUENCE)
    heads = drawn(_TOKENS // _SEQUENCE, _HEADS, _SEQUENCE, _WIDTH // _HEADS)
    lengths = torch.full((len(scores),), _SEQUENCE - _SEQUENCE // 10)
    hidden = torch.ones(_SEQUENCE, _SEQUENCE, dtype=torch.bool).triu(1)
    hidden = hidden | (torch.arange(_SEQUENCE) >= lengths[:, None, None, None])
    cos, sin = angles(torch.arange(_SEQUENCE), _WIDTH // _HEADS)
    targets = torch.randint(0, _WORDS, (_TOKENS,), generator=generator)
    wide = (_WIDTH,)

    def eager_add(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, r: torch.Tensor) -> Any:
        total = x + r
        return function(total), total

    def eager_rotary(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        c, s = torch.cat([cos, cos], -1).to(dtype), torch.cat([sin, sin], -1).to(dtype)
        return x * c + torch.cat([-second, first], -1) * s

    def eager_softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.125).masked_fill(hidden, -torch.inf), -1)

    return {
        "LayerNorm": _Piece((x, w, b), layer_norm, lambda x, w, b: F.layer_norm(x, wide, w, b)),
        "residual + LayerNorm": _Piece(
            (x, residual, w, b),
            add_layer_norm,
            lambda x, r, w, b: eager_add(lambda s: F.layer_norm(s, wide, w, b), x, r),
        ),
        "residual + RMSNorm": _Piece(
            (x, residual, w), add_rms_norm, lambda x, r, w: eager_add(lambda s: F.rms_norm(s, wide, w, 1e-6), x, r)
        ),
        "bias + GeLU": _Piece((inner, inner_b), gelu, lambda x, b: F.gelu(x + b)),
        "bias + GeLU, tanh": _Piece(
            (inner, inner_b),
            lambda x, b: gelu(x, b, approximate="tanh"),
            lambda x, b: F.gelu(x + b, approximate="tanh"),
        ),
        "SwiGLU": _Piece((inner, drawn(_TOKENS, 4 * _WIDTH)), swiglu, lambda g, u: F.silu(g) * u),
        "bias + dropout + residual": _Piece(
            (x, b, residual),
            lambda x, b, r: dropout(x, _DRAW, bias=b, residual=r),
            lambda x, b, r: r + F.dropout(x + b, _P),
        ),
        "softmax, causal, padded": _Piece(
            (scores,), lambda x: softmax(x, lengths=lengths, causal=True, scale=0.125), eager_softmax
        ),
        "rotary": _Piece((heads,), lambda x: rotary(x, cos, sin), eager_rotary),
        "linear cross-entropy": _Piece(
            (x, drawn(_WORDS, _WIDTH) * 0.02),
            lambda x, w: linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets),
        ),
        "a BERT layer with dropout": _layer(drawn(4, _TOKENS // 16, _WIDTH), dtype),
    }


def _layer(x: torch.Tensor, dtype: torch.dtype) -> _Piece:
    config = LayerConfig(_WIDTH, _HEADS, norm="post", dropout=_P, attention_dropout=_P, dtype=dtype)
    params = init(config)
    leaves, spec = torch.utils._pytree.tree_flatten(params)

    def ours(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        return transformer_layer(config, torch.utils._pytree.tree_unflatten(leaves, spec), x, Key(1))

    def eager(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        p = torch.utils._pytree.tree_unflatten(leaves, spec)

        def linear(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, p["weight"], p["bias"])

        q, k, v = linear(p["attn"]["qkv"], x).unflatten(-1, (_HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = F.dropout(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1), _P)
        x = x + F.dropout(linear(p["attn"]["out"], (seen @ v).transpose(1, 2).flatten(2)), _P)
        x = F.layer_norm(x, (_WIDTH,), p["ln1"]["weight"], p["ln1"]["bias"])
        x = x + F.dropout(linear(p["mlp"]["down"], F.gelu(linear(p["mlp"]["up"], x))), _P)
        return F.layer_norm(x, (_WIDTH,), p["ln2"]["weight"], p["ln2"]["bias"])

    return _Piece((x, *leaves), ours, eager)


if __name__ == "__main__":
    print(measure(20).markdown())

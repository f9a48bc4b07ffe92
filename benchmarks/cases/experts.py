"""A layer of experts, forward and backward, on one core: against dense products, transformers' and DeepSpeed's layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import Times, interleave, one_thread, processor
from benchmarks.peers.experts import IMPLEMENTATIONS, deepspeed_layer, mixtral, of_mixtral
from shardlib.kernels.common.dispatch import choose
from shardlib.kernels.permute import permute, unpermute

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DENSE, _LAYER, _SAME = 1.12, {"fp32": 0.92, "bf16": 0.55}, 0.9
_COPIED = 1 / 0.7  # of the time that a copy of as many bytes takes

MIXTRAL = sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"))  # the block's router and experts
_SCALE = 0.02  # of matrices

Call = Callable[[], Any]
# Calls that take turns, and the comparison of their times.
Turns = tuple[dict[str, Call], Callable[[Times], list[Row]]]


class Sizes(NamedTuple):
    """Of the layer."""

    tokens: int
    width: int
    inner: int
    experts: int


_SIZES, _SMALL = Sizes(4096, 512, 2048, 8), Sizes(64, 32, 64, 4)


def measure(setting: Setting) -> Result:
    sizes = _SMALL if setting.small else _SIZES
    rows, times = [], {}
    with one_thread():
        for name, dtype in _DTYPES.items():
            for part in (_against_dense, _against_mixtral, _against_deepspeed, _against_a_copy):
                calls, compared = part(sizes, name, dtype)
                turns = {call: lambda _, run=run: run() for call, run in calls.items()}
                found = interleave(turns, setting.rounds, warm=1, stopwatch=processor)
                times |= found
                rows += compared(found)
    about = (
        f"{sizes.tokens:,} tokens of width {sizes.width}, {sizes.experts} experts of {sizes.inner}, forward and backward to "
        f"tokens, router and experts; one thread, seconds of processor time, calls of one dtype take turns, "
        f"{setting.rounds} rounds. “Dense”: the layer of one expert for all tokens, with as many operations in its products. "
        "transformers' is the fastest of its implementations. DeepSpeed's drops tokens, by the same capacity as ours does. "
        "“Copy”: of as many bytes as permutation moves. Products by expert: "
        f"{choose('grouped_matmul', setting.device)}."
    )
    return tables.compared("A layer of experts", about, rows, times)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return (scale * values).to(dtype).requires_grad_()


def both(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Call:
    """Forward and backward to ``x`` and ``leaves``."""
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    return lambda: torch.autograd.grad(function(x), (x, *leaves), dy)


def ours(x: torch.Tensor, router: torch.Tensor, experts: dict[str, torch.Tensor], config: sl.nn.MoEConfig) -> Call:
    params = {"router": {"weight": router}, "experts": experts}
    return both(lambda x: sl.nn.moe(params, x, config)[0], x, (router, *experts.values()))


def _gelu(sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens, a router, and experts with GELU."""
    tokens, width, inner, experts = sizes
    up = drawn(experts, inner, width, dtype=dtype, scale=_SCALE)
    down = drawn(experts, width, inner, dtype=dtype, scale=_SCALE)
    router = drawn(experts, width, dtype=torch.float32, scale=_SCALE)
    return drawn(tokens, width, dtype=dtype), router, {"up": up, "down": down}


def _against_dense(sizes: Sizes, name: str, dtype: torch.dtype) -> Turns:
    x, router, experts = _gelu(sizes, dtype)
    up, down = (matrices[0].detach().clone().requires_grad_() for matrices in experts.values())
    mine, theirs = f"dropless, GELU, top-1, {name}", f"dense, GELU, {name}"
    calls = {
        mine: ours(x, router, experts, sl.nn.MoEConfig(sl.nn.routers.switch(), expert="gelu")),
        theirs: both(lambda x: F.linear(F.gelu(F.linear(x, up)), down), x, (up, down)),
    }
    return calls, lambda times: [tables.row(times, mine, theirs, _DENSE)]


def _against_mixtral(sizes: Sizes, name: str, dtype: torch.dtype) -> Turns:
    tokens, width, inner, experts = sizes
    x = drawn(tokens, width, dtype=dtype)
    calls: dict[str, Call] = {}
    for how in IMPLEMENTATIONS:
        block = mixtral(how, width, inner, experts, 2).to(dtype)
        calls[f"Mixtral, {how}, {name}"] = both(lambda x, block=block: block(x[None])[0], x, tuple(block.parameters()))
    peers, mine = tuple(calls), f"dropless, SwiGLU, top-2, {name}"
    router, matrices = of_mixtral(block)
    calls[mine] = ours(x, router, matrices, MIXTRAL)

    def compared(times: Times) -> list[Row]:
        best = min(peers, key=lambda peer: statistics.median(times[peer]))
        return [tables.row(times, mine, best, _LAYER[name])]

    return calls, compared


def _against_deepspeed(sizes: Sizes, name: str, dtype: torch.dtype) -> Turns:
    x, router, experts = _gelu(sizes, dtype)
    for bias, size in (("up_bias", sizes.inner), ("down_bias", sizes.width)):
        experts[bias] = torch.zeros(sizes.experts, size, dtype=dtype, requires_grad=True)
    capacity = sl.nn.routers.Capacity(1.0, minimum=4, priority="random")
    config = sl.nn.MoEConfig(sl.nn.routers.switch(capacity), expert="gelu")
    mine, theirs = f"capacity 1, GELU and biases, top-1, {name}", f"DeepSpeed, {name}"
    calls = {mine: ours(x, router, experts, config)}
    peer = deepspeed_layer(sizes.width, sizes.inner, sizes.experts)
    if peer is not None:
        peer = peer.to(dtype)
        with torch.no_grad():  # both choose by the same router, so as many tokens are kept
            peer.deepspeed_moe.gate.wg.weight.copy_(router)
        calls[theirs] = both(lambda x: peer(x[None])[0][0], x, tuple(peer.parameters()))
    return calls, lambda times: [tables.row(times, mine, theirs, _SAME)]


def _against_a_copy(sizes: Sizes, name: str, dtype: torch.dtype) -> Turns:
    """Permutation of rows and its inverse, top-1: either reads and writes each number once."""
    x = drawn(8 * sizes.tokens, sizes.width, dtype=dtype).detach()
    positions = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:, None]
    permuted, restored, copy = (f"{what}, {name}" for what in ("permute", "unpermute", "copy"))
    calls: dict[str, Call] = {
        permuted: lambda: permute(x, positions),
        restored: lambda: unpermute(x, positions),
        copy: x.clone,
    }
    return calls, lambda times: [tables.row(times, one, copy, _COPIED) for one in (permuted, restored)]


CASE = Case("experts", "a layer of experts against dense products and peers' layers", {CPU: 20}, measure)

"""Cross entropy of logits and its gradient by a Triton kernel: a program reads one row twice, block by block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardlib.kernels.common import tiles
from shardlib.kernels.linear_cross_entropy import Aim

BLOCK = 4096

load: tiles.Loader = tiles.triton_name


def losses_(logits: torch.Tensor, aim: Aim, gradients: bool) -> torch.Tensor:
    count, words = logits.shape
    losses = torch.empty(count, device=logits.device)
    if count:
        targets, *options = aim
        constants = {"GRADIENTS": gradients, "BLOCK": min(BLOCK, triton.next_power_of_2(words)), **tiles.EXACT}
        _losses[(count,)](logits, targets.contiguous(), losses, words, *options, num_warps=8, **constants)
    return losses


@triton.jit
def _losses(logits, targets, losses, words, ignored, smoothing, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignored
    known = (target >= 0) & (target < words)
    z = logits + row * words
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, words, BLOCK):
        inside = first + lane < words
        value = tl.load(z + first + lane, mask=inside, other=0.0).to(tl.float32)
        plain += value
        higher = tl.maximum(most, tl.where(inside, value, float("-inf")))
        # A lane without a value still has −∞, and −∞ − (−∞) would be NaN.
        total = tl.where(most == float("-inf"), 0.0, total * tl.exp(most - higher)) + tl.where(
            inside, tl.exp(value - higher), 0.0
        )
        most = higher
    largest = tl.max(most, axis=0)
    total = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - largest)), axis=0)
    chosen = tl.load(z + target, mask=known, other=float("nan")).to(tl.float32)
    spread = tl.where(smoothing > 0, smoothing * (tl.sum(plain, axis=0) / words), 0.0)  # −∞ is no NaN without smoothing
    loss = largest + tl.log(total) - (1 - smoothing) * chosen - spread
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENTS:
        for first in range(0, words, BLOCK):
            word = first + lane
            value = tl.load(z + word, mask=word < words, other=0.0).to(tl.float32)
            slope = tl.exp(value - largest) / total - smoothing / words
            slope -= tl.where(word == target, 1 - smoothing, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(z + word, slope.to(logits.dtype.element_ty), mask=word < words)

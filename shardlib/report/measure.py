"""Measured times of the blocks of a loss, for cutting them into stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.execute.batches import as_tensors
from shardlib.execute.losses import read_loss
from shardlib.execute.stages.interpreter import differentiable, fresh_leaf
from shardlib.mesh.mesh import as_mesh
from shardlib.nn.blocks import Sequential
from shardlib.rng import Key
from shardlib.tree import Tree, leaves_of, tree_map


def measure_blocks(
    loss_fn: Sequential,
    params: Sequence[Tree],
    microbatch: Any,
    *,
    rng: Key | None = None,
    rounds: int = 5,
    mesh: Any = None,
) -> tuple[float, ...]:
    """Seconds of each block's forward and backward, for ``pipeline(partition=...)``.

    Blocks run one after the other on the device of ``microbatch``. The result is the median over ``rounds`` for each block,
    after a first round that is not counted.

    Args:
        loss_fn: an `sl.sequential`.
        params: one tree per block. Leaves on the meta device get random values while their block runs, so that a model
            can be measured of which only one block fits in memory.
        microbatch: one micro-batch of a rank's batch.
        rng: a key, for a loss that takes one.
        mesh: if given, all its ranks measure, and the result is the mean over ranks, so that all cut the same stages.

    Raises:
        ValueError: the numbers of trees and blocks differ, or ``rounds`` is below 1.

    >>> loss_fn = sl.sequential([lambda p, carry, x: x @ p, lambda p, carry, x: (carry @ p).sum()])
    >>> seconds = sl.report.measure_blocks(loss_fn, [torch.ones(4, 4), torch.ones(4, 4)], torch.ones(2, 4), rounds=1)
    >>> len(seconds)
    2
    """
    if len(params) != len(loss_fn) or rounds < 1:
        raise ValueError(
            f"measure_blocks: {len(loss_fn)} blocks, {len(params)} parameter trees, rounds={rounds}; give one tree per "
            "block and at least one round"
        )
    measured = [_round(loss_fn, params, microbatch, rng) for _ in range(rounds + 1)][1:]
    medians = [statistics.median(times) for times in zip(*measured, strict=True)]
    if mesh is None:
        return tuple(medians)
    mesh = as_mesh(mesh)
    of_all_ranks = primitives.all_gather_object(mesh, list(mesh.shape), medians)
    return tuple(statistics.fmean(times) for times in zip(*of_all_ranks, strict=True))


def _round(loss_fn: Sequential, params: Sequence[Tree], microbatch: Any, rng: Key | None) -> list[float]:
    device = next(
        (leaf.device for leaf in leaves_of(microbatch) if isinstance(leaf, torch.Tensor)), torch.device("cpu")
    )
    microbatch = as_tensors(microbatch, device)
    carry: Any = None
    times = []
    for index in range(len(loss_fn)):
        tree = tree_map(lambda leaf: _leaf(leaf, device), params[index])
        start = _now()
        result = loss_fn.run([None] * index + [tree], carry, microbatch, index, index + 1, rng)
        if index + 1 == len(loss_fn):
            result = read_loss(result, False).total
        outputs = differentiable(result)
        inputs = [*differentiable(tree), *differentiable(carry)]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs], allow_unused=True)
        times.append(_now() - start)
        carry = tree_map(fresh_leaf, result)
    return times


def _leaf(leaf: Any, device: torch.device) -> Any:
    """A parameter on ``device`` that requires a gradient."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_meta:
        leaf = torch.empty_like(leaf, device=device)
        leaf = leaf.normal_(0, 0.02) if leaf.is_floating_point() else leaf.zero_()
    return leaf.detach().requires_grad_(leaf.is_floating_point())


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()

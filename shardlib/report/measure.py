"""Measured times: of a loss's blocks, for cutting them into stages; of an operator however small; and a device's peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.collectives import primitives
from shardlib.execute.batches import as_tensors
from shardlib.execute.counting import WorkCount
from shardlib.execute.losses import read_loss
from shardlib.execute.stages.runs import differentiable, fresh_leaf
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
    measured = [_round_of_blocks(loss_fn, params, microbatch, rng) for _ in range(rounds + 1)][1:]
    medians = [statistics.median(times) for times in zip(*measured, strict=True)]
    if mesh is None:
        return tuple(medians)
    mesh = as_mesh(mesh)
    of_all_ranks = primitives.all_gather_object(mesh, list(mesh.shape), medians)
    return tuple(statistics.fmean(times) for times in zip(*of_all_ranks, strict=True))


def _round_of_blocks(loss_fn: Sequential, params: Sequence[Tree], microbatch: Any, rng: Key | None) -> list[float]:
    device = next(
        (leaf.device for leaf in leaves_of(microbatch) if isinstance(leaf, torch.Tensor)), torch.device("cpu")
    )
    microbatch = as_tensors(microbatch, device)
    carry: Any = None
    times = []
    for index in range(len(loss_fn)):
        tree = tree_map(lambda leaf: _leaf(leaf, device), params[index])
        start = _now(device)
        result = loss_fn.run([None] * index + [tree], carry, microbatch, index, index + 1, rng)
        if index + 1 == len(loss_fn):
            result = read_loss(result, False).total
        outputs = differentiable(result)
        inputs = [*differentiable(tree), *differentiable(carry)]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs], allow_unused=True)
        times.append(_now(device) - start)
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


_LAYERS, _LAUNCH_ROUNDS = 64, 7


def measure_launches(device: torch.device | str = "cpu") -> float:
    """Operators per second that a device begins, forward and backward: ``bandwidth={"launches": ...}`` of `predict_step`.

    Of layers so small that their elements take no time, counted as traces count them. The median of some rounds, after a
    first one.

    >>> sl.report.measure_launches() > 0
    True
    """
    x = torch.ones(1, 8, device=device)
    weights = [torch.full((8, 8), 0.1, device=device, requires_grad=True) for _ in range(_LAYERS)]
    work = WorkCount()
    with work:
        _round_of_launches(x, weights)
    seconds = [_round_of_launches(x, weights) for _ in range(_LAUNCH_ROUNDS + 1)][1:]
    return sum(work.launches) / statistics.median(seconds)


def _round_of_launches(x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    start = _now(x.device)
    for weight in weights:
        x = F.gelu(F.linear(x, weight))
    torch.autograd.grad(x.sum(), weights)
    return _now(x.device) - start


_SIDES = (1024, 2048, 4096, 8192)  # of the matrices: the first that keeps the device for long enough
_LONG = 5e-3  # seconds
_PEAK_ROUNDS = 5


def measure_peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of large products of matrices, with torch's present number of threads.

    Matrices of 1,024 rows, and twice as many while a product takes less than 5 ms, up to 8,192.

    The best of some rounds, measured once in a process for each device, dtype and number of threads.

    >>> sl.report.measure_peak() > 0
    True
    """
    return _measured(torch.device(device), dtype, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    best = 0.0
    for side in _SIDES:
        seconds = _seconds(side, device, dtype)
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG:
            break
    return best


def _seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the quickest of some products."""
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(_PEAK_ROUNDS + 1):
        start = _now(device)
        a @ b
        seconds.append(_now(device) - start)
    return min(seconds[1:])


def _now(device: torch.device) -> float:
    """The time at which a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

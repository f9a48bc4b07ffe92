"""Adafactor (arXiv 1804.04235), which keeps only the row and column means of a matrix's g².

On shards every rank sums its elements of each row and column, and one sum over all ranks gives the totals. This is the only
exchange that grows with the parameters: by their rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardlib.collectives.summation import Summation, sum_of_squares
from shardlib.mesh.specs import IndexMap
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_integer, is_positive, is_share, is_size, is_step
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards, device_of
from shardlib.optim.stepping import ParameterChange, each, each_leaf, stepping
from shardlib.plan.claims import LeafInfo
from shardlib.tree import Tree, tree_map


class FactoredMoments(NamedTuple):
    """The running means of a parameter's g² along its largest dimension (``row``) and its second largest (``col``).

    Flat, fp32 or wider; equal on all ranks.
    """

    row: torch.Tensor
    col: torch.Tensor


class AdafactorState(NamedTuple):
    """``count``: steps taken (0-d float); ``factors``: path -> `FactoredMoments`; ``v``: running mean of g² of other
    parameters; ``mu``: the momentum, or () without momentum.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    factors: Mapping[str, FactoredMoments]
    v: Tree
    mu: Tree

    def by_path(self) -> tuple[str, ...]:
        """See `shardlib.optim.base.StateMethods`."""
        return ("factors",)


@dataclass(frozen=True)
class Unfactored:
    """The choice of parameters whose second largest dimension is below ``least``; of all parameters for None."""

    least: int | None

    def __call__(self, info: LeafInfo) -> bool:
        return self.least is None or len(info.shape) < 2 or sorted(info.shape)[-2] < self.least


@coded
def adafactor(
    lr: float | Schedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
) -> GradientTransformation:
    """Update ``−lr·u·scale`` with ``u = g/√v̂`` clipped; v̂ has one factor for each row and one for each column.

    Args:
        lr: the rate; None for 1.
        min_dim_size_to_factor: parameters with two dimensions of at least this size are factored over the two largest.
        decay_rate: v ← β·v + (1−β)·(g² + eps) with β = 1 − (t + 1 − decay_offset)^−decay_rate at step t from 0,
            and 0 up to step ``decay_offset``.
        multiply_by_parameter_scale: whether scale is the root mean square of the parameter, at least 1e-3; else it is 1.
        clipping_threshold: the largest root mean square of a parameter's u; None for no clipping.
        momentum: the decay of a running mean of updates, which is then the update; None for no momentum.
        weight_decay_rate: the share of a parameter that is subtracted from it at each step, not multiplied by ``lr``.

    Defaults as optax.adafactor. In torch's Adafactor ``eps`` has another meaning.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.adafactor(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.3536,  0.3536])
    """
    check(
        "adafactor",
        "decay_rate and eps are above 0, clipping_threshold too or None, momentum at least 0 and below 1 or None, "
        "weight_decay_rate at least 0 or None, decay_offset an integer and min_dim_size_to_factor one from 1",
        decay_rate=(decay_rate, is_positive(decay_rate)),
        decay_offset=(decay_offset, is_integer(decay_offset)),
        clipping_threshold=(clipping_threshold, clipping_threshold is None or is_positive(clipping_threshold)),
        momentum=(momentum, momentum is None or is_share(momentum)),
        weight_decay_rate=(weight_decay_rate, weight_decay_rate is None or is_size(weight_decay_rate)),
        eps=(eps, is_positive(eps)),
        min_dim_size_to_factor=(min_dim_size_to_factor, is_step(min_dim_size_to_factor)),
    )
    rate, carried = as_schedule(1.0 if lr is None else lr, "adafactor"), momentum or 0.0
    unfactored = Unfactored(min_dim_size_to_factor if factored else None)

    def init(params: Tree, shards: Shards) -> AdafactorState:
        device = device_of(params)

        def zeros(dims: list[int], info: LeafInfo) -> torch.Tensor:
            return torch.zeros(math.prod(dims), dtype=_wide(info.dtype), device=device)

        factors = {
            info.path: FactoredMoments(zeros(_without(info.shape, d0), info), zeros(_without(info.shape, d1), info))
            for info in shards.about(params)
            if not unfactored(info)
            for d1, d0 in [_largest(info.shape)]
        }
        v = tree_map(torch.zeros_like, shards.select(unfactored, params).take(params))
        return AdafactorState(torch.zeros(()), factors, v, tree_map(torch.zeros_like, params) if carried else ())

    def step(
        params: Tree, grads: Tree, state: AdafactorState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[AdafactorState, ParameterChange]:
        size, count = rate(state.count), state.count + 1
        keep = float(1 - (count.to(torch.float64) - decay_offset).clamp(min=1) ** -decay_rate)
        infos = shards.about(params)
        grads = tree_map(torch.Tensor.contiguous, grads)  # `_divide` needs rows
        if scale is not None:
            each(lambda g: g.mul_(scale), grads)
        factors = _next_factors(infos, grads, state.factors, keep, shards)

        def direct(g: torch.Tensor, v: torch.Tensor) -> None:
            v.mul_(keep).add_(g.square().add_(eps), alpha=1 - keep)
            g.mul_(v.rsqrt())

        each(direct, shards.select(unfactored, grads).take(grads), state.v)
        for number, index_map, (g,) in shards.located(grads):
            if not unfactored(infos[number]):
                _divide(g, index_map, factors[infos[number].path])
        factor = -size * _factor(infos, params, grads, shards)
        if weight_decay_rate is None and not carried:
            return AdafactorState(count, factors, state.v, ()), ParameterChange(lambda p, u: u, (grads,), factor)

        def carry(number: int, u: torch.Tensor, *mean: torch.Tensor) -> None:
            u.mul_(factor[number])
            for m in mean:
                u.copy_(m.lerp_(u, 1 - carried))

        each_leaf(shards, carry, grads, *([state.mu] if carried else []))
        decay = weight_decay_rate or 0.0
        return AdafactorState(count, factors, state.v, state.mu), ParameterChange(
            lambda p, u: u.add_(p, alpha=-decay), (grads,)
        )

    def _next_factors(
        infos: list[LeafInfo], grads: Tree, before: Mapping[str, FactoredMoments], keep: float, shards: Shards
    ) -> dict[str, FactoredMoments]:
        """The factors after this step. The sums of all parameters lie in one vector, for one exchange."""
        sizes = [len(factor) for factors in before.values() for factor in factors]
        shape = (sum(sizes), shards.summation.width)
        sums = torch.zeros(shape, dtype=torch.float64, device=device_of(grads))

        def by_path(values: torch.Tensor) -> dict[str, FactoredMoments]:
            views = iter(values.split(sizes))
            return {path: FactoredMoments(next(views), next(views)) for path in before}

        table = by_path(sums)
        for number, index_map, (g,) in shards.shares(grads):
            info = infos[number]
            if not unfactored(info):
                for chunk, chunk_map in index_map.chunks(g):
                    _add_sums(table[info.path], chunk.square().add_(eps), chunk_map, shards.summation)
        totals = by_path(shards.total(sums))
        after = {}
        for info in infos:
            if not unfactored(info):
                dims = reversed(_largest(info.shape))
                means = [total / info.shape[dim] for total, dim in zip(totals[info.path], dims)]
                pairs = zip(before[info.path], means)
                after[info.path] = FactoredMoments(*(old.lerp(new.to(old.dtype), 1 - keep) for old, new in pairs))
        return after

    def _factor(infos: list[LeafInfo], params: Tree, directions: Tree, shards: Shards) -> torch.Tensor:
        """The factor of each parameter's update from clipping and from the parameter's scale, ``[leaf_count]``."""
        of_both = (sum_of_squares.of(0), sum_of_squares.of(1))
        sizes = torch.tensor([max(math.prod(info.shape), 1) for info in infos], dtype=torch.float64)
        squares = shards.leaf_sums(of_both, params, directions)
        param_rms, update_rms = (squares / sizes.to(squares.device)).sqrt()
        factor = torch.ones_like(param_rms)
        if clipping_threshold is not None:
            factor = factor / (update_rms / clipping_threshold).clamp(min=1)
        return factor * param_rms.clamp(min=1e-3) if multiply_by_parameter_scale else factor

    def sends(shards: Shards) -> Mapping[str, int]:
        infos = [info for info in shards.about({}) if not unfactored(info)]
        rows = [math.prod(_without(info.shape, dim)) for info in infos for dim in _largest(info.shape)]
        return shards.total_sends(sum(rows))

    return stepping("adafactor", init, step, Locality.LEAF, sends=sends)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _largest(shape: tuple[int, ...]) -> tuple[int, int]:
    """The second largest dimension and the largest. Of dimensions of equal size the later counts as larger."""
    second, first = sorted(range(len(shape)), key=lambda dim: shape[dim])[-2:]
    return second, first


def _without(shape: tuple[int, ...], dim: int) -> list[int]:
    return [size for other, size in enumerate(shape) if other != dim]


def _add_sums(sums: FactoredMoments, squares: torch.Tensor, index_map: IndexMap, summation: Summation) -> None:
    """Add ``squares``, at the elements of ``index_map``, to a parameter's flat sums along its two largest dimensions."""
    box = index_map.box(len(squares))
    grid = squares.new_zeros(math.prod(box.shape))
    grid[box.skip : box.skip + len(squares)] = squares
    for flat, dim in zip(sums, reversed(_largest(index_map.shape))):
        covered = box.without(flat.view(*_without(index_map.shape, dim), summation.width), dim)
        covered += summation.along(grid.view(box.shape), dim)


def _divide(g: torch.Tensor, index_map: IndexMap, factors: FactoredMoments) -> None:
    """Divide ``g``, at the elements of ``index_map``, by √v̂ in place."""
    d1, d0 = _largest(index_map.shape)
    rows, columns = factors.row.view(_without(index_map.shape, d0)), factors.col.view(_without(index_map.shape, d1))
    rows = (rows / rows.mean(dim=d1 - 1 if d1 > d0 else d1, keepdim=True)).rsqrt_()
    columns = columns.rsqrt()
    for chunk, chunk_map in index_map.chunks(g):
        box = chunk_map.box(len(chunk))
        by = box.without(rows, d0).unsqueeze(d0) * box.without(columns, d1).unsqueeze(d1)
        chunk.mul_(by.reshape(-1)[box.skip : box.skip + len(chunk)])

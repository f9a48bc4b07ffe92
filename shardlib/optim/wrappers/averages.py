"""Running averages of trees: of updates in a chain, or of parameters beside the training."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_share
from shardlib.optim.code import coded
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, check_alike, tree_map


class EmaState(NamedTuple):
    """``count``: trees averaged (0-d float); ``ema``: their average without bias correction, at least float32."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    ema: Tree


class SwaState(NamedTuple):
    """``count``: trees averaged (0-d float); ``mean``: their mean, at least float32."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mean: Tree


@coded
def ema(decay: float, debias: bool = True) -> GradientTransformation:
    """``e ← decay·e + (1−decay)·u`` from 0; returns e, with ``debias`` divided by 1 − decayᵗ; as optax.ema.

    In a chain it averages updates. To average parameters, pass them to ``update`` after every step. The average lies in the
    optimizer's layout, and takes as much memory as one of Adam's moments::

        average = sl.optim.ema(0.999)
        kept = average.init(state.params)
        averaged, kept = average.update(state.params, kept)  # `Sharded` parameters, for an eval step

    16-bit parameters are averaged themselves, not their fp32 masters.

    Raises:
        ValueError: ``decay`` is not in [0, 1).

    >>> average, params = sl.optim.ema(0.9), {"w": torch.ones(2)}
    >>> kept = average.init(params)
    >>> averaged, kept = average.update(params, kept)
    >>> averaged["w"]
    tensor([1., 1.])
    """
    check("ema", "decay is at least 0 and below 1 (usually 0.999)", decay=(decay, is_share(decay)))

    def init(params: Tree, _: Shards) -> EmaState:
        return EmaState(torch.zeros(()), tree_map(_wide_zeros, params))

    def update(updates: Tree, state: EmaState, params: Tree, *, shards: Shards) -> tuple[Tree, EmaState]:
        check_alike("ema", updates, state.ema, ("tree", "average"))
        count = state.count + 1
        mean = tree_map(lambda u, e: e.lerp(u.to(e.dtype), 1 - decay), updates, state.ema)
        grown = 1 - decay ** count.to(torch.float64) if debias else 1.0
        return tree_map(lambda u, e: (e / grown).to(u.dtype), updates, mean), EmaState(count, mean)

    return GradientTransformation(init, update, Locality.ELEMENTWISE)


@coded
def swa() -> GradientTransformation:
    """The mean of all trees so far; of parameters, stochastic weight averaging (arXiv 1803.05407).

    Used like `ema`, after the steps whose parameters should be averaged; as torch.optim.swa_utils.AveragedModel.

    >>> average = sl.optim.swa()
    >>> kept = average.init({"w": torch.zeros(2)})
    >>> for value in (1.0, 3.0):
    ...     mean, kept = average.update({"w": torch.full((2,), value)}, kept)
    >>> mean["w"]
    tensor([2., 2.])
    """

    def init(params: Tree, _: Shards) -> SwaState:
        return SwaState(torch.zeros(()), tree_map(_wide_zeros, params))

    def update(updates: Tree, state: SwaState, params: Tree, *, shards: Shards) -> tuple[Tree, SwaState]:
        check_alike("swa", updates, state.mean, ("tree", "average"))
        count = state.count + 1
        mean = tree_map(lambda u, m: m + (u.to(m.dtype) - m) / count, updates, state.mean)
        return tree_map(lambda u, m: m.to(u.dtype, copy=True), updates, mean), SwaState(count, mean)

    return GradientTransformation(init, update, Locality.ELEMENTWISE)


def _wide_zeros(leaf: torch.Tensor) -> torch.Tensor:
    """Zeros like ``leaf`` in at least float32, since 16 bits would lose the small weight of each tree."""
    return torch.zeros_like(leaf, dtype=torch.float64 if leaf.dtype == torch.float64 else torch.float32)

"""How stable training is: spikes of the loss, and the size of Adam's second moments (arXiv 2108.06084, section 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.optim.shards import MeshShards
from shardlib.optim.train_state import TrainState


class Stability(NamedTuple):
    """Loss ratios of a run, one for each step: its loss over the smallest loss before it, and 1 for the first.

    A loss that is not finite has a ratio of ∞, and is no loss before others.
    """

    ratios: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.ratios)

    def spikes(self, above: float = 1.2) -> int:
        """The number of steps whose ratio is above ``above``. The paper counts those above 1.2 and 1.5."""
        return sum(ratio > above for ratio in self.ratios)


def stability(losses: Iterable[Any]) -> Stability:
    """The stability of a run by the losses of its steps: numbers above 0, in a list, an array, a tensor or any iterable.

    Raises:
        ValueError: no losses, or some that are no numbers, or 0 or below, which have no ratios; names them.

    >>> found = sl.report.stability([4.0, 3.0, 2.0, 2.6, 1.9, 4.0])
    >>> found.spikes(), found.spikes(above=1.5), round(found.largest, 2)
    (2, 1, 2.11)
    """
    given = losses.tolist() if isinstance(losses, (torch.Tensor, np.ndarray)) else losses
    values = [_number(loss) for loss in given] if isinstance(given, Iterable) and not isinstance(given, str) else []
    wrong = [
        f"{value} at step {step}" for step, value in enumerate(values) if not isinstance(value, float) or value <= 0
    ]
    if wrong or not values:
        what = ", ".join(wrong[:5]) if values else "none" if isinstance(given, Iterable) else repr(losses)
        raise ValueError(f"stability: losses are numbers above 0, one for each step and one or more, not {what}")
    ratios, least = [], None
    for loss in values:
        if not math.isfinite(loss):
            ratios.append(math.inf)
            continue
        ratios.append(1.0 if least is None else loss / least)
        least = loss if least is None else min(least, loss)
    return Stability(tuple(ratios))


def _number(loss: Any) -> Any:
    """A loss as a Python number; what is none, as it is."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return loss


class SecondMoments(NamedTuple):
    """Sizes of √v over all elements, where v is Adam's running mean of g².

    Attributes:
        norm: the sum of √v (its l1 norm).
        largest: the largest √v.
    """

    norm: float
    largest: float


def second_moments(state: TrainState) -> SecondMoments:
    """The sizes of Adam's √v in a state, over all ranks, each of which calls it. Every element that is trained counts once.

    Raises:
        TypeError: something else than the state of `make_train_step`.
        ValueError: the state has no second moments of all trained parameters in memory, or several of them.

    >>> state, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adam(0.1))
    >>> state, _ = train_step(state, torch.tensor([3.0, 4.0]))
    >>> sizes = sl.report.second_moments(state)  # v is 0.001·g²
    >>> round(sizes.norm / 0.001**0.5, 4), round(sizes.largest / 0.001**0.5, 4)
    (7.0, 4.0)
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"second_moments takes the TrainState of sl.make_train_step, on every rank, not {type(state).__name__}"
        )
    plan, names = state.params.plan, {bucket.name for bucket in state.params.plan.trained}
    found = [nu for nu in _second_moments_in(state.opt.inner) if nu and nu.keys() == names and _in_memory(nu)]
    if len(found) != 1:
        raise ValueError(
            f"second_moments: {len(found)} running means of g² over all trained parameters in memory. Take sl.optim.adam or "
            "adamw, not in 8 bits, on disk or in sl.optim.partition"
        )
    shards = MeshShards(plan, state.params.mesh)
    sums = shards.leaf_sums([lambda v: v.sqrt().sum(dtype=torch.float64)], found[0])
    largest = shards.leaf_max(lambda v: v.amax(), found[0])
    return SecondMoments(float(sums.sum()), float(largest.max().clamp(min=0).sqrt()))


def _second_moments_in(state: Any) -> Iterator[dict[str, Any]]:
    """The fields ``nu`` of a transformation's state and of those in it."""
    if isinstance(getattr(state, "nu", None), dict):
        yield state.nu
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    for part in parts:
        yield from _second_moments_in(part)


def _in_memory(tree: dict[str, Any]) -> bool:
    return all(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree.values())

"""Gradient noise (arXiv 1511.06807), the same on every mesh."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shardlib.init.draws import Draw
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_integer, is_number, is_size
from shardlib.optim.code import coded
from shardlib.optim.shards import Locality, Shards
from shardlib.rng import Key
from shardlib.tree import Tree, tree_map


class NoiseState(NamedTuple):
    """``count``: steps taken (0-d float)."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it


@coded
def add_noise(eta: float, gamma: float, key: Key | int) -> GradientTransformation:
    """Add normal noise of variance ``eta/(1 + t)^gamma`` at step t from 0; as optax.add_noise, with other random numbers.

    The numbers depend only on the key, the step, the parameter's path and the element's index in the parameter.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    >>> tx = sl.optim.add_noise(0.01, 0.55, key=0)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> bool((updates["w"] != 0).all())
    True
    """
    check(
        "add_noise",
        "a variance is at least 0, gamma is a number, and the key a Key or an integer",
        eta=(eta, is_size(eta)),
        gamma=(gamma, is_number(gamma)),
        key=(key, isinstance(key, Key) or is_integer(key)),
    )
    # Folded, so that a loss function with the same key, into which steps are folded too, draws other numbers.
    root = (key if isinstance(key, Key) else Key(key)).fold_in("gradient noise")

    def init(params: Tree, _: Shards) -> NoiseState:
        return NoiseState(torch.zeros(()))

    def update(updates: Tree, state: NoiseState, params: Tree, *, shards: Shards) -> tuple[Tree, NoiseState]:
        step, infos = int(state.count), shards.about(updates)
        spread = math.sqrt(eta / (1 + step) ** gamma)
        noisy = tree_map(lambda u: u.clone(memory_format=torch.contiguous_format), updates)
        for number, index_map, (leaf,) in shards.located(noisy):
            leaf_key = root.fold_in(step).fold_in(infos[number].path)
            draw = Draw("normal", (0.0, spread), leaf_key.seed, 0, infos[number].shape, leaf.dtype)
            for chunk, chunk_map in index_map.chunks(leaf):
                chunk.add_(draw.at(chunk_map.flat(len(chunk), chunk.device)))
        return noisy, NoiseState(state.count + 1)

    return GradientTransformation(init, update, Locality.ELEMENTWISE)

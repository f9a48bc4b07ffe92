"""`LocalRunner`: runs a function on a rank's parameters as it computes with them, without units or gathers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common.writes import owner_of
from shardlib.execute.batches import WholeBatch
from shardlib.execute.dealing import as_used
from shardlib.execute.scaled import ScaledProducts
from shardlib.execute.surroundings import Surroundings
from shardlib.sharded.local import Local
from shardlib.tree import unflatten

T = TypeVar("T")


class LocalRunner:
    """Runs functions on ``params``, without gradients."""

    def __init__(self, params: Local) -> None:
        plan, mesh = params.plan, params.mesh
        # Second copies of experts would change no number, and be sent anew for every token.
        tokens = None if plan.step.tokens is None else replace(plan.step.tokens, spare=0)
        batch = WholeBatch(plan, mesh, False, lambda: None)
        leaves = [leaf.to(mesh.device) for _, leaf in params.leaves()]
        scaled = [(p.path, x) for p, x in zip(plan.leaves, leaves) if p.scaled and isinstance(x, torch.Tensor)]
        products = ScaledProducts(lambda factor: owner_of(factor, scaled) is not None) if scaled else None
        self._surroundings = Surroundings(mesh, batch, None, None, tokens, plan.step.autocast, products)
        slices = Slices(mesh, None)
        used = [as_used(leaf, placement, False, slices) for placement, leaf in zip(plan.leaves, leaves)]
        self._tree = unflatten(plan.shape.treedef, used)

    def evaluate(self, fn: Callable[[Any], T]) -> T:
        """``fn(parameters)``."""
        with self._surroundings.installed(), torch.no_grad():
            return fn(self._tree)

"""`LocalRunner`: runs a function on a rank's parameters as it computes with them, without units or gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common.writes import owner_of
from shardlib.execute.dealing import DealtHandle
from shardlib.execute.handles import Handle
from shardlib.execute.scaled import ScaledProducts
from shardlib.execute.slicing import SlicedHandle
from shardlib.execute.surroundings import Surroundings
from shardlib.execute.whole_batch import WholeBatch
from shardlib.plan.placement import Placement
from shardlib.sharded.local import Local
from shardlib.tree import unflatten

T = TypeVar("T")


class _There:
    """The source of handles of leaves that are there, and need not be tensors."""

    gathers = False

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves

    def leaf(self, index: int) -> Any:
        return self._leaves[index]

    data = leaf

    def root_gradient(self, index: int) -> NoReturn:
        raise AssertionError("without gradients")


class LocalRunner:
    """Runs functions on ``params``, without gradients."""

    def __init__(self, params: Local) -> None:
        plan, mesh = params.plan, params.mesh
        # Second copies of experts would change no number, and be sent anew for every token.
        tokens = None if plan.step.tokens is None else replace(plan.step.tokens, spare=0)
        batch = WholeBatch(plan, mesh, False, lambda: None)
        self._params, self._slices = params, Slices(mesh, None)
        leaves = [leaf.to(mesh.device) for _, leaf in params.leaves()]
        scaled = [(p.path, x) for p, x in zip(plan.leaves, leaves) if p.scaled and isinstance(x, torch.Tensor)]
        products = ScaledProducts(lambda factor: owner_of(factor, scaled) is not None) if scaled else None
        self._surroundings = Surroundings(mesh, batch, None, None, tokens, plan.step.autocast, products)
        source = _There(leaves)
        used = [self._used(source, index, place, leaf) for index, (place, leaf) in enumerate(zip(plan.leaves, leaves))]
        self._tree = unflatten(plan.shape.treedef, used)

    def evaluate(self, fn: Callable[[Any], T]) -> T:
        """``fn(parameters)``."""
        with self._surroundings.installed(), torch.no_grad():
            return fn(self._tree)

    def _used(self, source: Any, index: int, placement: Placement, leaf: Any) -> Any:
        """A leaf as the function gets it: itself, or a handle of a slice or of experts that are dealt out."""
        if placement.style is None and not placement.dealt:
            return leaf
        path, shape = placement.path, tuple(leaf.shape)
        like = torch.empty(0, dtype=leaf.dtype, device=self._params.mesh.device)
        if placement.style is None:
            handle = Handle(source, index, path, shape, like, False)
        else:
            window = self._params.window(placement)
            handle = SlicedHandle.make(
                source, index, path, shape, like, False, placement.style, window, self._slices, placement.scaled
            )
        return DealtHandle.make(handle, path, placement.dealt) if placement.dealt else handle

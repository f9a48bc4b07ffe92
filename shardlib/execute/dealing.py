"""Handles of leaves of experts that are dealt out over the mesh: layers of experts open them, other uses are refused.

A rank's share of such a leaf is for the tokens of all ranks. A function that used it as it is would give each rank's tokens
the experts that happen to be there, and nothing would fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import no_torch_function, outside_of_graphs
from shardlib.errors import HandleError
from shardlib.execute.handles import Handle, Present, materialise
from shardlib.execute.slicing import SlicedHandle
from shardlib.nn.moe.placement import ShardedExperts
from shardlib.plan.placement import Placement


class _Shut:
    """The source of a handle that gives nothing."""

    def __init__(self, path: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        self._path, self._shape, self._axes = path, shape, axes

    def _refuse(self, index: int) -> NoReturn:
        path, held, over = self._path, (*self._shape, 1)[0], " and ".join(map(repr, self._axes))
        raise HandleError(
            f"{path} is used by something else than a layer of experts. sl.experts deals it out over axis {over}: this rank "
            f"holds {held} of it along dimension 0, for all ranks' tokens. Stack a layer's experts along dimension 0 of each "
            "leaf and give the leaves to sl.nn.moe or sl.nn.run_experts, whose expert function may use them as it likes; or "
            f"leave {path} out of the rules of sl.experts"
        )

    leaf = data = root_gradient = _refuse


class DealtHandle(Handle, ShardedExperts):
    """A handle that stands for this rank's experts of a leaf.

    Attributes:
        _inside: what it opens to: a handle, or the leaf.
    """

    _inside: torch.Tensor

    @staticmethod
    def make(inside: torch.Tensor, path: str, axes: tuple[str, ...]) -> DealtHandle:
        """The handle that only a layer of experts exchanges for ``inside``, a handle or the leaf itself."""
        with no_torch_function():
            shape, trained = tuple(inside.shape), inside.requires_grad
        handle = DealtHandle(_Shut(path, shape, axes), 0, path, shape, inside, trained)
        handle._inside, handle.path = inside, path
        return handle

    def arrived(self) -> DealtHandle:
        inside = self.local()
        inside = inside.arrived() if isinstance(inside, Handle) else inside
        with no_torch_function():
            shape, trained = tuple(self.shape), self.requires_grad
        handle = DealtHandle(self._source, self._index, self._path, shape, inside, trained)
        handle._inside, handle.path = inside, self.path
        return handle

    @outside_of_graphs
    def local(self) -> torch.Tensor:
        inside = self._inside
        if not isinstance(inside, Handle) or isinstance(inside, SlicedHandle):
            return inside
        source: Any = inside._source
        return inside if source.gathers else source.leaf(inside._index)

    def rows_for_replicas(self, rows: Sequence[int]) -> torch.Tensor:
        leaf = materialise(self._inside)
        chosen = leaf.index_select(0, torch.tensor(rows, dtype=torch.int64, device=leaf.device))
        return chosen.view(len(rows), math.prod(leaf.shape[1:]))

    def replicas(self, rows: torch.Tensor) -> torch.Tensor:
        inside = self._inside
        with no_torch_function():
            leaf = rows.view(len(rows), *inside.shape[1:])
        return inside.of_rows(leaf) if isinstance(inside, SlicedHandle) else leaf


def as_used(leaf: Any, placement: Placement, trained: bool, slices: Slices) -> Any:
    """A leaf that is there, and need not be a tensor, as a function gets it: itself, or a handle of a slice or of experts
    that are dealt out."""
    if placement.style is not None:
        leaf = SlicedHandle.make(Present(leaf), 0, placement, tuple(leaf.shape), leaf, trained, slices)
    return DealtHandle.make(leaf, placement.path, placement.dealt) if placement.dealt else leaf

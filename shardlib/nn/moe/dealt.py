"""`Dealt`: a leaf of experts that are dealt out over the mesh, as a loss function gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.tree import leaves_of, tree_map


class Dealt:
    """A leaf of which this rank has some experts and other ranks the others (`shardlib.experts`).

    Only a layer of experts uses it, among whose tokens are those of other ranks; every other use is refused.

    Attributes:
        path: the leaf's path.
        opened: gives the leaf, to a layer of experts.
        lent: gives rows of the leaf, by their numbers, to be sent to other ranks: ``[rows, elements of an expert]``.
        borrowed: makes of other ranks' rows, as these lent them, a leaf like the one that ``opened`` gives.
    """

    path: str
    opened: Callable[[], torch.Tensor]
    lent: Callable[[Sequence[int]], torch.Tensor]
    borrowed: Callable[[torch.Tensor], torch.Tensor]


def opened(params: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool | None]:
    """The parameters for a layer of experts, and whether all of them are dealt out; None if only some are."""
    dealt = {isinstance(leaf, Dealt) for leaf in leaves_of(params)}
    found = tree_map(lambda leaf: leaf.opened() if isinstance(leaf, Dealt) else leaf, params)
    return found, None if len(dealt) > 1 else True in dealt

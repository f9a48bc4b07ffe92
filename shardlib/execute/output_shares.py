"""A rank's share of a sliced layer's outputs, followed through the code after it: uses that fit in shape and are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slices
from shardlib.errors import HandleError
from shardlib.execute.along import PIECES, TOGETHER, Grouping, Piece, name_of, summed
from shardlib.execute.following import Following, Mark, asked


class OutputShares(Following):
    """Marks of shares of outputs: each of the path of its layer's weight.

    Args:
        styles: path -> style of each sliced leaf.
    """

    def __init__(self, styles: Mapping[str, Style], slices: Slices) -> None:
        super().__init__()
        self._styles, self._slices = styles, slices

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        if func is torch.einsum and isinstance(args[0], str):
            self._refuse_einsum(args[0], args[1:])
        return super().look(func, args, kwargs)

    def _begins(self, x: torch.Tensor) -> Mark | None:
        path = self._slices.layer_of(x)
        return Mark(path) if path and self._slices.mesh.shape[self._styles[path].axis] > 1 else None

    def _grouped(self, mark: Mark, x: torch.Tensor, result: torch.Tensor, group: Grouping) -> Mark:
        size = x.shape[mark.dim]
        if group.size < size and not mark.groups:
            self._refuse_groups(mark, size, group)
        return Mark(mark.of, group.dim, group.size < size or (mark.groups and group.size == size))

    def _refuse(self, mark: Mark, func: Any, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise if a call takes together, or apart, what this rank has only some of."""
        if func in PIECES and not mark.groups:
            self._refuse_pieces(mark, x.shape[mark.dim], asked(PIECES[func], x, mark.dim, *args, **kwargs) or [])
        if func in TOGETHER and mark.dim in (asked(TOGETHER[func], x, *args, **kwargs) or ()):
            self._refuse_sum(mark, name_of(func), x)

    def _refuse_einsum(self, equation: str, operands: Sequence[Any]) -> None:
        for place, x in enumerate(operands):
            mark = self.mark_of(x)
            if mark is not None and summed(equation, place, mark.dim):
                self._refuse_sum(mark, f"einsum({equation!r})", x)

    def _refuse_sum(self, mark: Mark, name: str, x: torch.Tensor) -> NoReturn:
        what = "heads or other groups of outputs" if mark.groups else "outputs"
        raise HandleError(
            f"{name} takes all {what} of {mark.of} together, and this rank has {x.shape[mark.dim]} of them "
            f"({self._sliced(mark)}): the result would be wrong. Give sl.column(gather=True) for it and "
            "sl.row(split=True) for the layer after it, or 'replicated' for both; a number to look at can be taken of the "
            "share's detach()"
        )

    def _refuse_pieces(self, mark: Mark, size: int, pieces: Sequence[Piece]) -> None:
        """Raise if pieces of a share are neither all of it nor its heads."""
        heads = self._heads(mark)
        each = size // heads if heads else 0
        if all(piece.size in (0, size) or (piece.size == each and piece.start % each == 0) for piece in pieces):
            return
        one = pieces[0]
        taken = f"{size} outputs on this rank in {len(pieces)} parts"
        if len(pieces) == 1:
            taken = f"outputs {one.start} to {one.start + one.size - 1} of the {size} on this rank"
        raise HandleError(
            f"{mark.of} is sliced ({self._sliced(mark)}), and the model takes its {taken}: where a layer is several in "
            "one (gate and up), a rank's parts are outputs of others. Make them leaves of their own, or give "
            "sl.column(gather=True) for it and sl.row(split=True) for the layer after it, or 'replicated' for both; where "
            "the parts are heads, give their number: sl.column(heads=...)"
        )

    def _refuse_groups(self, mark: Mark, size: int, group: Grouping) -> None:
        """Raise if the outputs are put in as many groups as all ranks together have."""
        heads, each = self._heads(mark), size // group.size
        if group.given is False or (heads and each == size // heads):
            return
        if group.given or (heads and each % (size // heads)):
            ways = self._slices.mesh.shape[self._styles[mark.of].axis]
            raise HandleError(
                f"{mark.of} is sliced ({self._sliced(mark)}), and the model puts its {size} outputs on this rank in "
                f"{group.size} groups of {each}: ranks have fewer heads, not smaller ones. Give the size of a head and "
                f"leave their number open, as in view(..., -1, {size // heads if heads else each * ways}); or, where "
                f"{group.size} is the number on this rank, give that of all: sl.column(heads={group.size * ways}). For a "
                "layer that is several in one (query, key and value), give 'replicated', and sl.row(split=True) for the "
                "layer after it"
            )

    def _heads(self, mark: Mark) -> int:
        """On this rank; 0 where the style gives none."""
        style = self._styles[mark.of]
        return getattr(style, "heads", 0) // self._slices.mesh.shape[style.axis]

    def _sliced(self, mark: Mark) -> str:
        style = self._styles[mark.of]
        return f"{style} over axis {style.axis!r}"

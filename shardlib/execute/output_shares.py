"""A rank's share of a sliced layer's outputs, followed through the code after it: uses that fit in shape and are wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slices
from shardlib.errors import HandleError
from shardlib.execute.along import MOVES, NUMBER_BY_NUMBER, PIECES, TOGETHER, Grouping, Piece, grouped, summed
from shardlib.execute.slicing import SlicedHandle


class _Share(NamedTuple):
    """What a dimension of a tensor is.

    Attributes:
        path: the weight of the layer whose outputs it has this rank's share of.
        dim: counted from the end.
        groups: whether it counts groups of them, such as heads, and what follows it the outputs of each.
    """

    path: str
    dim: int = -1
    groups: bool = False


class OutputShares:
    """Shares of outputs, and what activations, views and the like make of them.

    Args:
        styles: path -> style of each sliced leaf.
    """

    def __init__(self, styles: Mapping[str, Style], slices: Slices) -> None:
        self._styles, self._slices = styles, slices
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], _Share]] = {}  # by identity

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call.

        Raises:
            HandleError: it takes a share of outputs for all of them.
        """
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        shares = {id(x): share for x in given if (share := self._share_of(x))}
        if not shares:
            return func(*args, **kwargs)
        if func in TOGETHER and any(isinstance(x, SlicedHandle) for x in given):  # the layer that takes the share up
            return func(*args, **kwargs)
        if func is torch.einsum and isinstance(args[0], str):
            self._refuse_einsum(args[0], args[1:])
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        share = shares.get(id(first))
        if first is not None and share is not None:
            self._refuse(share, func, first, args[1:], kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not isinstance(result, SlicedHandle):
            found = None
            if getattr(func, "__name__", "").strip("_") in NUMBER_BY_NUMBER:
                found = next(iter(shares.values()))
            elif first is not None and share is not None:
                found = self._moved(share, func, first, args[1:], kwargs, result)
            if found and found.dim >= -result.dim():
                self._known[id(result)] = weakref.ref(result), found
        return result

    def _share_of(self, x: torch.Tensor) -> _Share | None:
        known, share = self._known.get(id(x), (None, None))
        if known is not None and known() is x:
            return share
        path = self._slices.layer_of(x)
        return _Share(path) if path and self._slices.mesh.shape[self._styles[path].axis] > 1 else None

    def _moved(
        self,
        share: _Share,
        func: Any,
        x: torch.Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> _Share | None:
        """The share in what a function makes of a tensor that has it."""
        if func in TOGETHER:  # of other dimensions
            return share if result.shape == x.shape else None
        if func in MOVES:
            dim = _asked(MOVES[func], x, share.dim, *args, **kwargs)
            return None if dim is None else share._replace(dim=dim)
        if (group := grouped(func, x, share.dim, args, result)) is None:
            return None
        if group.size < x.shape[share.dim] and not share.groups:
            self._refuse_groups(share, x.shape[share.dim], group)
        groups = group.size < x.shape[share.dim] or (share.groups and group.size == x.shape[share.dim])
        return _Share(share.path, group.dim, groups)

    def _refuse(self, share: _Share, func: Any, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise if a call takes together, or apart, what this rank has only some of."""
        if func in PIECES and not share.groups:
            self._refuse_pieces(share, x.shape[share.dim], _asked(PIECES[func], x, share.dim, *args, **kwargs) or [])
        if func in TOGETHER and share.dim in (_asked(TOGETHER[func], x, *args, **kwargs) or ()):
            self._refuse_sum(share, func.__name__.strip("_"), x)

    def _refuse_einsum(self, equation: str, operands: Sequence[Any]) -> None:
        for place, x in enumerate(operands):
            share = self._share_of(x) if isinstance(x, torch.Tensor) else None
            if share is not None and summed(equation, place, share.dim):
                self._refuse_sum(share, f"einsum({equation!r})", x)

    def _refuse_sum(self, share: _Share, name: str, x: torch.Tensor) -> NoReturn:
        what = "heads or other groups of outputs" if share.groups else "outputs"
        raise HandleError(
            f"{name} takes all {what} of {share.path} together, and this rank has {x.shape[share.dim]} of them "
            f"({self._sliced(share)}): the result would be wrong. Give sl.column(gather=True) for it and "
            "sl.row(split=True) for the layer after it, or 'replicated' for both; a number to look at can be taken of the "
            "share's detach()"
        )

    def _refuse_pieces(self, share: _Share, size: int, pieces: Sequence[Piece]) -> None:
        """Raise if pieces of a share are neither all of it nor its heads."""
        heads = self._heads(share)
        each = size // heads if heads else 0
        if all(piece.size == size or (piece.size == each and piece.start % each == 0) for piece in pieces):
            return
        one = pieces[0]
        taken = f"{size} outputs on this rank in {len(pieces)} parts"
        if len(pieces) == 1:
            taken = f"outputs {one.start} to {one.start + one.size - 1} of the {size} on this rank"
        raise HandleError(
            f"{share.path} is sliced ({self._sliced(share)}), and the model takes its {taken}: where a layer is several in "
            "one (gate and up), a rank's parts are outputs of others. Make them leaves of their own, or give "
            "sl.column(gather=True) for it and sl.row(split=True) for the layer after it, or 'replicated' for both; where "
            "the parts are heads, give their number: sl.column(heads=...)"
        )

    def _refuse_groups(self, share: _Share, size: int, group: Grouping) -> None:
        """Raise if the outputs are put in as many groups as all ranks together have."""
        heads, each = self._heads(share), size // group.size
        if group.given is False or (heads and each == size // heads):
            return
        if group.given or (heads and each % (size // heads)):
            ways = self._slices.mesh.shape[self._styles[share.path].axis]
            raise HandleError(
                f"{share.path} is sliced ({self._sliced(share)}), and the model puts its {size} outputs on this rank in "
                f"{group.size} groups of {each}: ranks have fewer heads, not smaller ones. Give the size of a head and "
                f"leave their number open, as in view(..., -1, {size // heads if heads else each * ways}); or, where "
                f"{group.size} is the number on this rank, give that of all: sl.column(heads={group.size * ways}). For a "
                "layer that is several in one (query, key and value), give 'replicated', and sl.row(split=True) for the "
                "layer after it"
            )

    def _heads(self, share: _Share) -> int:
        """On this rank; 0 where the style gives none."""
        style = self._styles[share.path]
        return getattr(style, "heads", 0) // self._slices.mesh.shape[style.axis]

    def _sliced(self, share: _Share) -> str:
        style = self._styles[share.path]
        return f"{style} over axis {style.axis!r}"


def _asked(what: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a call does, or None where its arguments have names that the table does not know."""
    try:
        return what(x, *args, **kwargs)
    except TypeError:
        return None

"""A rank's part of a sequence, followed through the code after it: what mixes positions fits in shape and is wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from shardlib.errors import LossError
from shardlib.execute.along import CONVOLUTIONS, NUMBER_BY_NUMBER, TOGETHER, Grouping, item_along
from shardlib.execute.following import Following, Mark, asked
from shardlib.execute.sequence import SequenceParts
from shardlib.nn.functional import embedding

_POSITIONS = "positions"
_BY_ATTENTION = (
    "Positions are mixed by sl.nn.attention alone; take sequence(...) out of the plan if the model mixes them otherwise"
)


class PositionParts(Following):
    """Marks of the dimension of positions. Sums over a part are right as summands of `sl.nn.sum_sequence`, and wrong beside
    the positions themselves."""

    def __init__(self, parts: SequenceParts) -> None:
        super().__init__()
        self._parts = parts
        self._sums: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by identity, with the function that summed

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        if self._parts.busy:  # the library's own code
            return None
        name = _name(func)
        summed = next((by for x in (*args, *kwargs.values()) if (by := self._summed_by(x))), None)
        if name in NUMBER_BY_NUMBER and summed and any(self.mark_of(x) for x in (*args, *kwargs.values())):
            self._fail(f"{summed} over positions, whose result is used beside them,")
        follow = super().look(func, args, kwargs)
        mark = self.mark_of(args[0]) if args else None
        if mark is not None and func in TOGETHER and mark.dim in (asked(TOGETHER[func], *args, **kwargs) or ()):
            summed = name
        elif name not in NUMBER_BY_NUMBER:
            summed = None

        def followed(result: Any) -> None:
            if follow is not None:
                follow(result)
            if func is embedding:
                self._known[id(result)] = weakref.ref(result), Mark(_POSITIONS, -2)
            if summed and isinstance(result, torch.Tensor):
                self._sums[id(result)] = weakref.ref(result), summed

        return followed if follow or summed or func is embedding else None

    def _summed_by(self, x: Any) -> str | None:
        known, name = self._sums.get(id(x), (None, None))
        return name if known is not None and known() is x else None

    def _begins(self, x: torch.Tensor) -> Mark | None:
        dim = self._parts.dim_of(x)
        return None if dim is None else Mark(_POSITIONS, dim)

    def _grouped(self, mark: Mark, x: torch.Tensor, result: torch.Tensor, group: Grouping) -> Mark | None:
        """Followed where the dimensions before it stay."""
        place = x.dim() + mark.dim
        kept = result.shape[: place + 1] == x.shape[: place + 1]
        return mark._replace(dim=place - result.dim()) if kept else None

    def _refuse(self, mark: Mark, func: Any, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if func in _MIXING and mark.dim in (asked(TOGETHER[func], x, *args, **kwargs) or ()):
            self._fail(f"{_name(func)} over positions")
        if func is F.pad and _padded(mark.dim, *args, **kwargs):
            self._fail("F.pad along positions")
        item = item_along(x, mark.dim, args[0]) if func is torch.Tensor.__getitem__ else None
        first_or_last = isinstance(item, int) or (
            func in _SELECT and args and args[0] in (mark.dim, mark.dim + x.dim())
        )
        if x.shape[mark.dim] > 1 and (first_or_last or _open(item)):
            self._fail(
                "an index that leaves out positions at an end of the part",
                "Shift or cut the batch before sl.nn.shard_sequence; sl.nn.gather_sequence is for what has no parameters",
            )

    def _fail(self, what: str, remedy: str = _BY_ATTENTION) -> NoReturn:
        raise LossError(
            f"{what} sees this rank's part of the sequence only ({self._parts.kind}), so that the result would be wrong. "
            f"{remedy}"
        )


def _name(func: Any) -> str:
    return getattr(func, "__name__", "").strip("_")


def _open(item: Any) -> bool:
    """Whether a slice leaves out one end and is open at the other, as shifts are; pieces of a loop have both ends."""
    if not isinstance(item, slice) or item.step not in (None, 1):
        return False
    return (item.start is None and bool(item.stop)) or (item.stop is None and bool(item.start))


def _padded(dim: int, pad: Sequence[int], *args: Any, **options: Any) -> bool:
    return any(pad[2 * (-1 - dim) : 2 * -dim])


_SELECT = {torch.select, torch.Tensor.select}
# Functions that mix what they take together into results for each of it.
_MIXING = {
    *(F.softmax, F.log_softmax, F.normalize, F.layer_norm, F.rms_norm, F.group_norm, *CONVOLUTIONS),
    *(
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "roll", "flip")
    ),
}

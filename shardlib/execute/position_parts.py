"""A rank's part of a sequence, followed through the code after it: what mixes positions fits in shape and is wrong."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.errors import LossError
from shardlib.execute.along import CONVOLUTIONS, NUMBER_BY_NUMBER, TOGETHER, Grouping, item_along, name_of, named
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
        self._sums: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()  # with the name of what summed

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        if self._parts.busy:  # the library's own code
            return None
        given, elementwise = (*args, *kwargs.values()), name_of(func) in NUMBER_BY_NUMBER
        by = next((self._sums[x] for x in given if isinstance(x, torch.Tensor) and x in self._sums), None)
        if elementwise and by and any(map(self.mark_of, given)):
            self._fail(f"{by} over positions, whose result is used beside them,")
        follow = super().look(func, args, kwargs)
        sums = name_of(func) if self._takes_positions(func, args, kwargs) else by if elementwise else None

        def followed(result: Any) -> None:
            if follow is not None:
                follow(result)
            if func is embedding:
                self._known[result] = Mark(_POSITIONS, -2)
            if sums and isinstance(result, torch.Tensor):
                self._sums[result] = sums

        return followed if follow or sums or func is embedding else None

    def _takes_positions(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes the positions of its first argument together."""
        mark = self.mark_of(args[0]) if func in TOGETHER and args else None
        return mark is not None and mark.dim in (asked(TOGETHER[func], *args, **kwargs) or ())

    def _begins(self, x: torch.Tensor) -> Mark | None:
        dim = self._parts.dim_of(x)
        return None if dim is None else Mark(_POSITIONS, dim)

    def _grouped(self, mark: Mark, x: torch.Tensor, result: torch.Tensor, group: Grouping) -> Mark | None:
        """Followed where the dimensions before it stay."""
        place = x.dim() + mark.dim
        kept = result.shape[: place + 1] == x.shape[: place + 1]
        return mark._replace(dim=place - result.dim()) if kept else None

    def _refuse(self, mark: Mark, func: Any, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if func in _MIXING and self._takes_positions(func, (x, *args), kwargs):
            self._fail(f"{name_of(func)} over positions")
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


def _open(item: Any) -> bool:
    """Whether a slice leaves out one end and is open at the other, as shifts are; pieces of a loop have both ends."""
    if not isinstance(item, slice) or item.step not in (None, 1):
        return False
    return (item.start is None and bool(item.stop)) or (item.stop is None and bool(item.start))


def _padded(dim: int, pad: Sequence[int], *args: Any, **options: Any) -> bool:
    return any(pad[2 * (-1 - dim) : 2 * -dim])


_SELECT = {*named("select")}
# Functions that mix what they take together into results for each of it.
_MIXING = {
    *(F.softmax, F.log_softmax, F.normalize, F.layer_norm, F.rms_norm, F.group_norm, *CONVOLUTIONS),
    *named("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "roll", "flip"),
}

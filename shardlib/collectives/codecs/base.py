"""What compressed sums over one axis have in common, however they travel.

A `Codec` says how; a `Line` is a codec bound to one buffer, and says what is kept from one exchange to the next and what is
sent. An `Exchange` is the sum of several buffers under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class Rows:
    """The layout of a buffer that is summed over an axis.

    Attributes:
        ways: ranks that exchange it; this one is number ``place``.
        elements: of the buffer.
        filled: from where to where each leaf's elements lie; what is between is padding, zero at all times.
        scattered: whether rank r's row is the r-th of ``ways`` equal parts of the buffer, with equally many leaves in
            each; else all ranks get the whole sum, and rows are only how the work is shared.
        mean: whether the result is the mean over the ranks; else the sum.
        dtype: of the buffer, of what is kept and of the result.
        shapes: the leaves', where the buffer holds them whole; else empty.
    """

    ways: int
    place: int
    elements: int
    filled: tuple[tuple[int, int], ...]
    scattered: bool
    mean: bool
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...] = ()

    def row(self, grain: int) -> int:
        """Elements of one row, padded to a multiple of ``grain``."""
        return -(-self.elements // (self.ways * grain)) * grain

    def pad(self, x: torch.Tensor, grain: int) -> torch.Tensor:
        """The buffer as ``[ways * row]``; ``x`` itself where that is the same."""
        row = self.row(grain)
        if self.ways * row == self.elements:
            return x
        if self.scattered:
            x = x.view(self.ways, -1)
            return F.pad(x, (0, row - x.shape[1])).view(-1)
        return F.pad(x, (0, self.ways * row - self.elements))

    def spans(self, grain: int) -> list[tuple[int, int]]:
        """``filled``, in the padded buffer."""
        if not self.scattered:
            return list(self.filled)
        leaves, shift = len(self.filled) // self.ways, self.row(grain) - self.elements // self.ways
        moved = [number // leaves * shift for number in range(len(self.filled))]
        return [(start + by, stop + by) for (start, stop), by in zip(self.filled, moved)]

    def unpadded(self, row: torch.Tensor) -> torch.Tensor:
        """One row of the result, without its padding."""
        return row[: self.elements // self.ways] if self.scattered else row


@dataclass(frozen=True)
class Kept:
    """A flat tensor that stays with a buffer from one exchange to the next, in ``TrainState.comm``. Subclasses are its kinds.

    Attributes:
        name: the kind's name in the names of ``TrainState.comm``.
        residual: whether the tensor holds, element by element of the buffer, what messages left out. If not, all ranks of
            the axis hold equal values.
        by_row: whether a rank holds the elements of its own row of the buffer. If not, a rank holds the whole buffer's.
        elements: number of elements on one rank.
        shapes: for `KeptFactors`: the index of each factor's leaf, and the factor's shape.
    """

    name: ClassVar[str]
    residual: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    elements: int
    shapes: tuple[tuple[int, tuple[int, int]], ...] = ()


class SentResidual(Kept):
    """What a rank's messages left out of its buffer, laid out as the padded buffer."""

    name = "sent"


class RowResidual(Kept):
    """What the second message, of a rank's row of the sum, left out of that row."""

    name = "row"
    by_row = True


class KeptFactors(Kept):
    """Low-rank factors of the sum, from which the next exchange starts."""

    name = "factors"
    residual = False


class Errors:
    """What is kept of earlier exchanges, by name; what was before stays as it is until `after` replaces it.

    Args:
        before: name -> flat tensor.
    """

    def __init__(self, before: dict[str, torch.Tensor]) -> None:
        self._before = before
        self.after = dict(before)

    def own(self, name: str) -> torch.Tensor:
        """An error that may be written to."""
        if self.after[name] is self._before.get(name):
            self.after[name] = self.after[name].clone()
        return self.after[name]


class Line(Protocol):
    """A codec bound to one buffer.

    Attributes:
        keeps: what stays from one exchange to the next.
        payload: bytes one rank sends.
    """

    @property
    def keeps(self) -> tuple[Kept, ...]: ...

    @property
    def payload(self) -> int: ...

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """A buffer as an exchange takes it; itself where it needs no padding."""
        ...

    def start(self, device: torch.device) -> list[torch.Tensor]:
        """What ``keeps`` is before the first exchange."""
        ...


L = TypeVar("L", bound=Line, covariant=True)


@dataclass(frozen=True)
class Item(Generic[L]):
    """One buffer of an exchange.

    Attributes:
        line: how it travels.
        buffer: padded as the line asks; used up.
        kept: names of what the line keeps.
    """

    line: L
    buffer: torch.Tensor
    kept: tuple[str, ...]


class Exchange(Protocol):
    """Buffers on their way to their sum (or mean)."""

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's row, where rows are scattered; else whole buffer, in ``out`` where given."""
        ...


class Codec(Protocol):
    """How sums travel in fewer bytes. Frozen and comparable: part of a plan.

    Attributes:
        wide: whether float64 can be sent.
        whole: whether it works on whole leaves, and buffers must hold them.
    """

    @property
    def wide(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    def bind(self, rows: Rows) -> Line: ...

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[Any]], errors: Errors) -> Exchange:
        """Start to sum buffers, all of lines of this codec. ``errors``: of all items; written to."""
        ...

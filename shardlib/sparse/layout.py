"""`Layout`: which blocks of the attention scores are computed, as compressed rows of blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shardlib.common.display.panels import Panel, Paragraph, Shown, Title
from shardlib.sparse.cells import cells_picture, cells_text, share_of_cells

_DRAWN, _CELLS, _TEXT = 3, 48, 36  # heads of different blocks; cells along a side, in a drawing and as text


@dataclass(frozen=True, eq=False)
class Layout(Shown):
    """The blocks of a ``[length, length]`` matrix of scores that are computed, for all heads or for each head.

    Memory is 4 bytes per computed block. Heads that have the same blocks share one list.

    Attributes:
        block: queries per block, and keys per block: a power of two, 16 or more.
        row_offsets: int32 ``[heads, size + 1]``; the blocks of row i of head h are
            ``columns[row_offsets[h, i] : row_offsets[h, i + 1]]``. One head stands for all heads.
        columns: int32 ``[stored blocks]``, ascending in every row.
        causal: whether a position sees no later ones, also inside the blocks on the diagonal. A causal layout has no block
            above the diagonal.
    """

    block: int
    row_offsets: torch.Tensor
    columns: torch.Tensor
    causal: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal={self.causal!r}: True or False")
        object.__setattr__(self, "block", operator.index(self.block))  # NumPy's integers too
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"a block of {self.block} positions: use a power of two, 16 or more")
        if self.row_offsets.dim() != 2 or self.columns.dim() != 1:
            shapes = f"{tuple(self.row_offsets.shape)} and {tuple(self.columns.shape)}"
            raise ValueError(f"row_offsets and columns have shapes {shapes}, not (heads, size + 1) and (blocks,)")
        if self.row_offsets.dtype != torch.int32 or self.columns.dtype != torch.int32:
            raise TypeError(f"row_offsets and columns are {self.row_offsets.dtype} and {self.columns.dtype}, not int32")
        if not self.row_offsets.is_contiguous() or not self.columns.is_contiguous():
            raise ValueError("row_offsets and columns must be contiguous: call .contiguous()")
        # Kernels compute addresses from these numbers.
        first, last = (0, 0) if not self.row_offsets.numel() else self.row_offsets.aminmax()
        if first < 0 or last > len(self.columns) or (self.row_offsets.diff() < 0).any():
            raise ValueError(f"row_offsets must ascend, from 0 at least to the {len(self.columns)} columns at most")
        if len(self.columns) and not 0 <= self.columns.min() <= self.columns.max() < self.size:
            raise ValueError(f"columns must be from 0 to {self.size - 1}, the last block of a row")
        begins = torch.zeros(len(self.columns) + 1, dtype=torch.bool, device=self.columns.device)
        begins[self.row_offsets.flatten().long()] = True
        if not (begins[1:-1] | (self.columns.diff() > 0)).all():
            raise ValueError("columns must ascend within a row, each at most once")
        if self.causal:
            self._check_below()

    def _check_below(self) -> None:
        """Raise `ValueError` where the last block of a row lies above the diagonal."""
        ends = self.row_offsets[:, 1:]
        filled = ends > self.row_offsets[:, :-1]
        rows = torch.arange(self.size, device=self.columns.device).expand_as(ends)[filled]
        if (self.columns[ends[filled].long() - 1] > rows).any():
            raise ValueError(
                "a causal layout with blocks above the diagonal: take Layout.from_dense(matrix.tril(), block, causal=True), "
                "or leave causal out"
            )

    @classmethod
    def from_rows(
        cls,
        block: int,
        patterns: Sequence[tuple[torch.Tensor, torch.Tensor]],
        heads: Sequence[int],
        causal: bool = False,
    ) -> Layout:
        """A layout from compressed rows: (offsets ``[size + 1]``, columns) of each pattern, and the pattern of each head."""
        starts = torch.tensor([0] + [len(columns) for _, columns in patterns]).cumsum(0)
        if starts[-1] >= 2**31:
            raise ValueError(f"{starts[-1]} blocks do not fit int32: use larger blocks, or fewer patterns")
        offsets = torch.stack([patterns[pattern][0] + starts[pattern] for pattern in heads])
        return cls(block, offsets.int(), torch.cat([columns.int() for _, columns in patterns]), causal)

    @classmethod
    def from_dense(cls, dense: torch.Tensor, block: int, *, causal: bool = False) -> Layout:
        """A layout of the blocks that are not zero in ``dense``: ``[size, size]`` for all heads, or ``[heads, size, size]``.

        With ``causal`` no block may lie above the diagonal.

        Raises:
            ValueError: another shape, or blocks above the diagonal of a causal layout.
        """
        if dense.dim() not in (2, 3) or dense.shape[-1] != dense.shape[-2]:
            raise ValueError(f"a layout of shape {tuple(dense.shape)}: use (size, size) or (heads, size, size)")
        dense = dense.reshape(-1, *dense.shape[-2:]) != 0
        distinct, heads = torch.unique(dense, dim=0, return_inverse=True)
        patterns = [(offsets_of(pattern.sum(dim=1)), pattern.nonzero()[:, 1]) for pattern in distinct]
        return cls.from_rows(block, patterns, heads.tolist(), causal)

    def to_dense(self) -> torch.Tensor:
        """The computed blocks as bool ``[heads, size, size]``, for small layouts."""
        dense = torch.zeros(self.heads, self.size, self.size, dtype=torch.bool, device=self.columns.device)
        for head in range(self.heads):
            rows, columns = self.pairs(head)
            dense[head, rows, columns] = True
        return dense

    def pairs(self, head: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the column of each block of a head, row by row."""
        offsets = self.row_offsets[head]
        rows = torch.arange(self.size, device=offsets.device).repeat_interleave(offsets.diff())
        return rows, self.columns[int(offsets[0]) : int(offsets[-1])]

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of one row's blocks in any head, int64 ``[n]``, ascending; and which heads have them, bool ``[heads,
        n]``."""
        held = torch.zeros(self.heads, self.size, dtype=torch.bool, device=self.columns.device)
        for head, (first, last) in enumerate(self.row_offsets[:, number : number + 2].tolist()):
            held[head, self.columns[first:last].long()] = True
        columns = held.any(0).nonzero().flatten()
        return columns, held[:, columns]

    def causal_for(self, causal: bool | None) -> bool:
        """Whether attention over this layout is causal, given the ``causal`` of its call (None for as the layout says).

        Raises:
            ValueError: the layout is causal, and ``causal`` is False.
        """
        if self.causal and causal is False:
            raise ValueError(
                "causal=False, and the layout is causal: make it with causal=False, or leave causal out of the call"
            )
        return self.causal or bool(causal)

    def leading(self, length: int) -> Layout:
        """The layout of the first ``length`` positions: the blocks that lie in their rows and columns.

        Raises:
            ValueError: the layout has fewer positions, or ``length`` is below 1.
        """
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        size = -(-length // self.block)
        if size > self.size:
            raise ValueError(
                f"{length} positions have {size} blocks of {self.block}, and the layout has {self.size}: make it for "
                f"length={length} at least"
            )
        if size == self.size:
            return self
        distinct, heads = torch.unique(self.row_offsets, dim=0, return_inverse=True)
        patterns = []
        for head in [heads.tolist().index(pattern) for pattern in range(len(distinct))]:
            rows, columns = self.pairs(head)
            kept = (rows < size) & (columns < size)
            patterns.append((offsets_of(torch.bincount(rows[kept], minlength=size)), columns[kept]))
        return Layout.from_rows(self.block, patterns, heads.tolist(), self.causal)

    @property
    def heads(self) -> int:
        """The number of heads; 1 for a layout that serves any number of heads."""
        return len(self.row_offsets)

    @property
    def size(self) -> int:
        """Blocks along a side: ⌈length / block⌉."""
        return self.row_offsets.shape[1] - 1

    @cached_property
    def blocks(self) -> int:
        """The number of computed blocks, summed over `heads`."""
        return int((self.row_offsets[:, -1] - self.row_offsets[:, 0]).sum(dtype=torch.int64))

    @property
    def density(self) -> float:
        """The share of blocks that are computed."""
        return self.blocks / (self.heads * self.size**2) if self.size else 0.0

    def to(self, device: torch.device | str) -> Layout:
        """This layout on another device; copied once per device, and kept."""
        device = torch.device(device)
        if device == self.columns.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self, row_offsets=self.row_offsets.to(device), columns=self.columns.to(device)
            )
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Layout]:
        return {}

    def __deepcopy__(self, memo: object) -> Layout:
        """This layout itself, which is immutable, so that copied modules share it."""
        return self

    def __repr__(self) -> str:
        heads = f"{self.heads} heads of " if self.heads > 1 else ""
        causal = ", causal" if self.causal else ""
        return f"Layout({heads}{self.size} × {self.size} blocks of {self.block}, density {self.density:.4f}{causal})"

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: the first heads that differ, a cell for one or several blocks."""
        yield Title(repr(self))
        alike: dict[tuple[int, ...], list[int]] = {}
        for head, offsets in enumerate(self.row_offsets.tolist()):
            alike.setdefault(tuple(offsets), []).append(head)
        drawn, lines = {}, []
        for heads in list(alike.values())[:_DRAWN]:
            more = f" and {len(heads) - 1} more alike" if len(heads) > 1 else ""
            name = f"head {heads[0]}{more}" if self.heads > 1 else ""
            pairs = self.pairs(heads[0])
            drawn[name] = share_of_cells(*pairs, self.size, _CELLS)
            lines += [*filter(None, [name]), cells_text(share_of_cells(*pairs, self.size, _TEXT))]
        if self.size:
            yield cells_picture(drawn, self.size * self.block, repr(self), "\n".join(lines))
        if len(alike) > _DRAWN:
            yield Paragraph(f"… and {len(alike) - _DRAWN} more kinds of heads")


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """The offsets of n consecutive lists of these lengths, int64 ``[n + 1]``: where each begins, and where the last ends."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def check_layout(layout: object) -> Layout:
    """``layout``, which must be a `Layout`.

    Raises:
        TypeError: ``layout`` is something else.
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is a {type(layout).__name__}: pass a pattern of sl.sparse, or sl.sparse.Layout.from_dense(matrix, block)"
        )
    return layout

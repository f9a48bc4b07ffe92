"""A layout's blocks as lists: what each query block reads, what reads each key block, what lies on each diagonal.

The kernels work on cells, squares whose side is a power of two that divides the layout's block and is no longer than
their tiles: a larger block is several. Heads with the same blocks share a pattern, and its lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.sparse_attention.arguments import Blocks


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of all patterns, as pairs.

    Attributes:
        pattern_of: int64 ``[heads]``; one head stands for all heads.
        patterns: how many.
        count: lists of a pattern.
        span: entries are in [0, span).
        owner: int64 ``[pairs]``, pattern · count + list.
        entry: int64 ``[pairs]``; no pair twice.
    """

    pattern_of: torch.Tensor
    patterns: int
    count: int
    span: int
    owner: torch.Tensor
    entry: torch.Tensor

    def lengths(self) -> torch.Tensor:
        return torch.bincount(self.owner, minlength=self.patterns * self.count)


@dataclass(frozen=True, eq=False)
class Cells:
    """Every cell of every pattern: pattern, row and column, int64 ``[cells]``; a pattern is ``size`` × ``size``."""

    pattern_of: torch.Tensor
    patterns: int
    size: int
    pattern: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    def by_row(self) -> Lists:
        """The columns of every row."""
        owner = self.pattern * self.size + self.row
        return Lists(self.pattern_of, self.patterns, self.size, self.size, owner, self.column)

    def by_column(self, group: int) -> Lists:
        """The rows of every column, over the ``group`` query heads that share a key head: entry = member · size + row."""
        members = self.pattern_of.expand(group) if len(self.pattern_of) == 1 else self.pattern_of
        groups, group_of = torch.unique(members.view(-1, group), dim=0, return_inverse=True)
        chosen = [self.pattern == pattern for pattern in range(self.patterns)]
        owner, entry = [], []
        for place, pattern in enumerate(groups.flatten().tolist()):
            owner.append(place // group * self.size + self.column[chosen[pattern]])
            entry.append(place % group * self.size + self.row[chosen[pattern]])
        return Lists(group_of, len(groups), self.size, group * self.size, torch.cat(owner), torch.cat(entry))

    def by_diagonal(self) -> Lists:
        """The rows of every diagonal: list = column − row + size − 1."""
        count = 2 * self.size - 1
        owner = self.pattern * count + self.column - self.row + self.size - 1
        return Lists(self.pattern_of, self.patterns, count, self.size, owner, self.row)


def cells(blocks: Blocks, block: int, side: int, causal: bool) -> Cells:
    """A layout's blocks cut into cells of ``side``, without those above the diagonal if ``causal``."""
    offsets, pattern_of = torch.unique(blocks.row_offsets.long(), dim=0, return_inverse=True)
    patterns, rows = offsets.shape[0], offsets.shape[1] - 1
    counts = offsets.diff(dim=1).flatten()
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    column = blocks.columns[offsets[:, :-1].flatten()[owner] + within].long()
    parts = block // side
    part = torch.arange(parts, device=owner.device)
    pattern = (owner // rows)[:, None, None].expand(-1, parts, parts)
    row = ((owner % rows)[:, None, None] * parts + part[:, None]).expand(-1, parts, parts)
    column = (column[:, None, None] * parts + part).expand(-1, parts, parts)
    kept = column <= row if causal else torch.ones_like(column, dtype=torch.bool)
    return Cells(pattern_of, patterns, rows * parts, pattern[kept], row[kept], column[kept])

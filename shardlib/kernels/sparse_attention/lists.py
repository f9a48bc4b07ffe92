"""A layout's blocks as lists: the key blocks of each query block, the query blocks of each key block, each diagonal.

The kernels compute cells: squares whose side is a power of two, divides the layout's block and is at most a tile's side. A
larger block is several cells. Heads with the same blocks share a pattern, and the pattern's lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.sparse_attention.arguments import Blocks


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of all patterns, as pairs.

    Attributes:
        pattern_of: int64 ``[heads]``: each head's pattern; ``[1]`` if all heads share one.
        patterns: the number of patterns.
        count: the number of lists of a pattern.
        span: entries are in [0, span).
        owner: int64 ``[pairs]``: the list that holds an entry, pattern · count + list.
        entry: int64 ``[pairs]``; no pair of owner and entry occurs twice.
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
    """Every cell of every pattern: its pattern, row and column, int64 ``[cells]``; a pattern has ``size`` × ``size``."""

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
        for number, pattern in enumerate(groups.flatten().tolist()):
            owner.append(number // group * self.size + self.column[chosen[pattern]])
            entry.append(number % group * self.size + self.row[chosen[pattern]])
        return Lists(group_of, len(groups), self.size, group * self.size, torch.cat(owner), torch.cat(entry))

    def by_diagonal(self) -> Lists:
        """The rows of every diagonal: list = column − row + size − 1."""
        count = 2 * self.size - 1
        owner = self.pattern * count + self.column - self.row + self.size - 1
        return Lists(self.pattern_of, self.patterns, count, self.size, owner, self.row)


def cells(blocks: Blocks, block: int, side: int, causal: bool) -> Cells:
    """A layout's blocks cut into cells of ``side``; if ``causal``, without the cells above the diagonal."""
    offsets, pattern_of = torch.unique(blocks.row_offsets.long(), dim=0, return_inverse=True)
    patterns, rows = offsets.shape[0], offsets.shape[1] - 1
    counts = offsets.diff(dim=1).flatten()
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    column = blocks.columns[offsets[:, :-1].flatten()[owner] + within].long()
    per_block = block // side
    inside = torch.arange(per_block, device=owner.device)
    pattern = (owner // rows)[:, None, None].expand(-1, per_block, per_block)
    row = ((owner % rows)[:, None, None] * per_block + inside[:, None]).expand(-1, per_block, per_block)
    column = (column[:, None, None] * per_block + inside).expand(-1, per_block, per_block)
    kept = column <= row if causal else torch.ones_like(column, dtype=torch.bool)
    return Cells(pattern_of, patterns, rows * per_block, pattern[kept], row[kept], column[kept])

"""The stages of a plan: one on every rank, or several along an axis, through which micro-batches pass by a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardlib.errors import IllegalComposition
from shardlib.schedules import Schedule, one_f_one_b
from shardlib.schedules.partition import Spans
from shardlib.tree import TreeDef

NO_BLOCKS = (
    "pipeline cuts a list of parameter trees, one per block, and {found}; make the loss sl.sequential([...]) and its "
    "parameters a list: gpt.to_blocks(params) does it for the library's GPT, sl.from_module(module, blocks=...) for modules"
)


@dataclass(frozen=True)
class Stages:
    """Stage s holds blocks ``range(*spans[s])`` and runs on the ranks at ``schedule.rank_of[s]`` along ``axis``.

    Attributes:
        axis: None for one stage, which all ranks run.
    """

    schedule: Schedule
    spans: Spans
    axis: str | None = None

    @classmethod
    def one(cls, microbatches: int) -> Stages:
        """All of the model, one micro-batch after the other."""
        return cls(one_f_one_b(1, microbatches), ((0, 1),))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis that stages lie along, if there is one: its ranks run other stages, and so other code."""
        return () if self.axis is None else (self.axis,)

    @property
    def count(self) -> int:
        return self.schedule.stages

    @property
    def last(self) -> int:
        """The coordinate whose ranks compute the loss."""
        return self.schedule.rank_of[-1]

    @property
    def uneven(self) -> bool:
        """Whether micro-batches may differ in size, so long as the loss weighs them."""
        return self.axis is not None

    def home(self, coords: Mapping[str, int]) -> int:
        """The coordinate along the axis."""
        return 0 if self.axis is None else coords[self.axis]

    def homes(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates along the axis that hold what these stages use, ascending."""
        return tuple(sorted({self.schedule.rank_of[stage] for stage in stages}))

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each coordinate along the axis."""
        return tuple(self.schedule.stages_of(home) for home in range(self.schedule.ranks))

    def over_blocks(self, treedef: TreeDef) -> Stages:
        """With the last blocks in the last stage, if those have no parameters: transforms see leaves alone.

        Raises:
            IllegalComposition: parameters that are not a list of blocks, or are fewer than the blocks that were cut.
        """
        if self.axis is None:
            return self
        if treedef.type not in (list, tuple):
            kind = treedef.type.__name__ if treedef.type else "single tensor"
            raise IllegalComposition(NO_BLOCKS.format(found=f"these parameters are a {kind}"))
        count = treedef.num_children
        *first, (start, stop) = self.spans
        if stop > count:
            raise IllegalComposition(f"pipeline: partition= gives {stop} costs for {count} blocks; give one per block")
        return replace(self, spans=(*first, (start, count)))

    def __str__(self) -> str:
        cut = " | ".join(f"{start}…{stop - 1}" if stop - start > 1 else str(start) for start, stop in self.spans)
        return f"{self.schedule.name} over axis {self.axis!r}, blocks {cut}"

"""The stages of a plan: one that every rank runs, or several along an axis, which micro-batches pass by a schedule."""

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
    """The stages of a model. Stage s holds blocks ``range(*spans[s])``, on the ranks at ``schedule.rank_of[s]`` of ``axis``.

    Attributes:
        axis: the mesh axis along which stages lie; None for one stage, which all ranks run.
    """

    schedule: Schedule
    spans: Spans
    axis: str | None = None

    @classmethod
    def one(cls, microbatches: int) -> Stages:
        """One stage with the whole model, which runs one micro-batch after the other."""
        return cls(one_f_one_b(1, microbatches), ((0, 1),))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis along which stages lie, as a tuple of at most one. Ranks along it run different code."""
        return () if self.axis is None else (self.axis,)

    @property
    def count(self) -> int:
        return self.schedule.stages

    @property
    def last(self) -> int:
        """The coordinate along the axis whose ranks compute the loss."""
        return self.schedule.rank_of[-1]

    @property
    def uneven(self) -> bool:
        """Whether micro-batches may differ in size, provided that the loss is a `Mean`."""
        return self.axis is not None

    def home(self, coords: Mapping[str, int]) -> int:
        """The coordinate along the stages' axis."""
        return 0 if self.axis is None else coords[self.axis]

    def homes(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates along the axis whose ranks run these stages, ascending."""
        return tuple(sorted({self.schedule.rank_of[stage] for stage in stages}))

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each coordinate along the axis."""
        return tuple(self.schedule.stages_of(home) for home in range(self.schedule.ranks))

    def over_blocks(self, treedef: TreeDef) -> Stages:
        """The stages with all blocks of the pytree: blocks at the end without parameters go to the last stage.

        (A transform that cuts blocks sees only leaves.)

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

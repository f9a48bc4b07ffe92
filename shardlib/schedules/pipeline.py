"""A pipeline on a mesh axis: a schedule, and which blocks make up each of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.schedules.actions import Schedule
from shardlib.schedules.partition import Spans

NO_BLOCKS = (
    "pipeline cuts a list of parameter trees, one per block, and {told}; make the loss sl.sequential([...]) and its "
    "parameters a list: gpt.to_blocks(params) does it for the library's GPT, sl.from_module(module, blocks=...) for modules"
)


@dataclass(frozen=True)
class Pipeline:
    """Stage s holds blocks ``range(*spans[s])`` and runs on the ranks at ``schedule.rank_of[s]`` along ``axis``."""

    axis: str
    schedule: Schedule
    spans: Spans

    def homes(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates along the axis that hold what these stages use, ascending."""
        return tuple(sorted({self.schedule.rank_of[stage] for stage in stages}))

    @property
    def last(self) -> int:
        """The coordinate whose ranks compute the loss."""
        return self.schedule.rank_of[-1]

    def __str__(self) -> str:
        cut = " | ".join(f"{start}…{stop - 1}" if stop - start > 1 else str(start) for start, stop in self.spans)
        return f"{self.schedule.name} over axis {self.axis!r}, blocks {cut}"

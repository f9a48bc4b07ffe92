"""The ways of training whose stability and tokens are compared: whole sequences, short ones first, fewer rows first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import shardlib as sl
from shardlib.models.gpt import GPTConfig

MULTIPLE = 8  # of lengths


@dataclass(frozen=True)
class Task:
    """A GPT, the rows of its batch and its peak rate, and how many tokens it is trained on.

    Attributes:
        warmup: the share of the tokens over which the rate rises.
        grows: the share of whole steps in which lengths, or rows, come to their last value.
        every: the share of the tokens between evaluations.
        window: the tokens over which losses are averaged before spikes are counted.
    """

    config: GPTConfig
    batch: int
    rate: float
    tokens: int
    warmup: float = 0.01
    grows: float = 0.3
    every: float = 0.05
    window: int = 4096


TASK = Task(GPTConfig(vocab=256, layers=4, width=96, heads=3, sequence=64), batch=16, rate=4e-3, tokens=1_024_000)
SMALL = Task(
    GPTConfig(vocab=256, layers=1, width=8, heads=2, sequence=16),
    batch=8,
    rate=3e-3,
    tokens=4096,
    every=0.25,
    window=256,
)


class Scale(NamedTuple):
    """What the baseline's batch and rate are multiplied by."""

    name: str
    rows: int
    rate: int


BASE, FASTER, LARGER = Scale("", 1, 1), Scale("4 × rate", 1, 4), Scale("8 × batch, 4 × rate", 8, 4)


class Way(NamedTuple):
    """What steps read: from a task, the rows of its batch and the number of steps in which something grows."""

    name: str
    plan: Callable[[Task, int, int], sl.data.Curriculum]


def _whole(task: Task, rows: int, steps: int) -> sl.data.Curriculum:
    return sl.data.curriculum(rows, sequence=task.config.sequence)


def _truncated(task: Task, rows: int, steps: int) -> sl.data.Curriculum:
    return sl.data.curriculum(rows, length=_lengths(task, steps))


def _more_rows(task: Task, rows: int, steps: int) -> sl.data.Curriculum:
    """As many more as they are shorter, so that a step keeps its tokens, and its loss the noise of as many."""
    lengths = _lengths(task, steps)
    return sl.data.curriculum(
        sl.data.map_paces(lambda length: rows * task.config.sequence // length, lengths), length=lengths
    )


def _fewer_rows(task: Task, rows: int, steps: int) -> sl.data.Curriculum:
    """From an eighth of the rows on: batch-size warm-up, as GPT-3's."""
    least = rows // 8
    return sl.data.curriculum(sl.data.linear_pace(least, rows, steps, least), sequence=task.config.sequence)


def _lengths(task: Task, steps: int) -> sl.data.Pace:
    return sl.data.linear_pace(MULTIPLE, task.config.sequence, steps, MULTIPLE)


WHOLE = Way("whole sequences", _whole)
SHORT = Way("short sequences first", _truncated)
MORE = Way("short sequences first, more of them", _more_rows)
FEWER = Way("fewer rows first", _fewer_rows)


class Arm(NamedTuple):
    """A way of training at a scale."""

    way: Way
    scale: Scale

    @property
    def name(self) -> str:
        return f"{self.way.name}, {self.scale.name}" if self.scale.name else self.way.name

    def plan(self, task: Task) -> sl.data.Curriculum:
        rows = self.scale.rows * task.batch
        return self.way.plan(task, rows, max(1, round(task.grows * task.tokens / (rows * task.config.sequence))))

    def rate(self, task: Task) -> sl.optim.Schedule:
        """A warm-up, then a cosine to 0, both over consumed tokens."""
        warm, peak = round(task.warmup * task.tokens), self.scale.rate * task.rate
        schedule = sl.optim.warmup_cosine_decay_schedule(0.0, peak, warm, task.tokens)
        return sl.optim.token_schedule(schedule, self.plan(task).tokens)

    def steps(self, task: Task) -> int:
        """The steps in which the task's tokens are consumed."""
        plan, last = self.plan(task), 1
        while plan.tokens(last) < task.tokens:
            last += math.ceil((task.tokens - plan.tokens(last)) / (self.scale.rows * task.batch * task.config.sequence))
        return last


_WAYS = {BASE: (WHOLE, SHORT, MORE), FASTER: (WHOLE, SHORT, MORE, FEWER), LARGER: (WHOLE, SHORT, MORE, FEWER)}
ARMS = [Arm(way, scale) for scale, ways in _WAYS.items() for way in ways]

"""The order in which choices come up: by what is known of their time, which is refined as they do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardlib.common.thresholds import Threshold
from shardlib.errors import ShardlibError
from shardlib.plan.machine import Machine
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import predict_on
from shardlib.plan.records import Trace
from shardlib.plan.tiers.limits import Limits
from shardlib.search.bounds import Bounds
from shardlib.search.model import Model, paced
from shardlib.search.space import Choice
from shardlib.search.times import Times
from shardlib.search.value import Found, Rejected

_SMALLER = (0.75, 0.5)  # of the memory of the quickest plan: budgets for which a search is made again
_REMEDIES = ("recompute", "offload")  # what of a choice takes time to save memory
_NO_MORE = "no more"
_ABOUT = 1.05  # of the bytes that are held: what a plan put together from blocks says at most
_ACTIONS = Threshold(4096)  # of a schedule: what is more of its steady part is not run on the clock


class _Unfit(Exception):
    """What rejects a choice: the kind of the reason, and the reason."""


class Searching:
    """A search, with what it has learnt so far.

    Args:
        within: the share of time that does not matter.

    Attributes:
        rejected: choice -> why.
        timed: choice -> seconds on the clock with traces put together from blocks, and bytes that a device holds at least.
    """

    def __init__(self, model: Model, machine: Machine, ranks: int, choices: Sequence[Choice], within: float) -> None:
        self.choices = choices
        self.rejected: dict[Choice, Rejected] = {}
        self.timed: dict[Choice, tuple[float, int]] = {}
        self._model, self._machine, self._ranks, self._within = model, machine, ranks, within
        self._bounds, self._times = Bounds(model, machine, ranks), Times(model, machine, ranks)
        self._bounded: dict[Choice, tuple[float, int]] = {}
        # Choice -> its exact plan, and the bytes that a device holds.
        self._planned: dict[Choice, tuple[Plan, int]] = {}
        self._found: dict[Choice, Found] = {}
        self._all = set(choices)
        self._after = {name: _followers(getattr(choice, name) for choice in choices) for name in _REMEDIES}

    def front(self) -> Iterator[Found]:
        """The quickest choice, and the quickest ones of those that hold less."""
        first = last = self.quickest(self._machine.memory)
        if first is None or last is None:
            return
        yield first
        for share in _SMALLER:
            found = self.quickest(int(share * first.bytes))
            if found is not None and found.bytes < last.bytes:
                yield found
                last = found

    def quickest(self, budget: int) -> Found | None:
        """The quickest choice that holds no more than a budget: each comes up in the order of what is known of its time.

        Recompute and offload take time to save memory: a choice with them comes up once it is known not to fit without.
        """
        plain, numbers, best = self._plain(), itertools.count(), None
        heap: list[tuple[float, int, int, Choice]] = []
        seen: set[Choice] = set()

        def add(choice: Choice, least: float, known: int = 0) -> None:
            heapq.heappush(heap, (least, next(numbers), known, choice))

        def remedy(choice: Choice, least: float) -> None:
            again = replace(choice, recompute=self._after["recompute"].get(choice.recompute, _NO_MORE))
            moved = replace(choice, offload=self._after["offload"].get(choice.offload, _NO_MORE))
            for other in (again, moved):
                if other in self._all and other not in seen:
                    seen.add(other)
                    add(other, least)

        for choice in self.choices:
            if all(getattr(choice, name) == next(iter(self._after[name])) for name in _REMEDIES):
                add(choice, self._times.soonest(choice, plain))
        while heap:
            least, _, known, choice = heapq.heappop(heap)
            if best is not None and least >= best.seconds * (1 - self._within):
                break
            try:
                if choice in self.rejected:
                    fits = False
                elif known == 2:
                    fits = self._exact(choice)[1] <= budget
                    if fits and (best is None or self._ran(choice).seconds < best.seconds):
                        best = self._ran(choice)
                else:
                    seconds, held = self._clocked(choice) if known else self._bound(choice)
                    fits = held <= budget
                    if fits:
                        add(choice, max(least, seconds), known + 1)
            except (_Unfit, ShardlibError) as error:
                kind, reason = error.args if isinstance(error, _Unfit) else ("does not compose", str(error))
                self.timed.pop(choice, None)
                self.rejected[choice] = Rejected(choice, kind, reason)
                fits = False
            if not fits:
                remedy(choice, least)
        return best

    def _plain(self) -> Sequence[Trace]:
        """The traces of blocks on one device, for one row."""
        return self._model.blocks(Choice((), 1, 1, precision=self.choices[0].precision)).one

    def _bound(self, choice: Choice) -> tuple[float, int]:
        """The seconds that a choice takes, and the bytes that a device holds, at least, by its blocks."""
        if choice not in self._bounded:
            if excess := self._bounds.excess(choice):
                raise _Unfit(f"{excess.what} exceed {excess.memory} memory", str(excess))
            seconds = self._times.seconds(choice, self._bounds.stages(choice))
            self._bounded[choice] = seconds, self._bounds.held(choice)
        return self._bounded[choice]

    def _clocked(self, choice: Choice) -> tuple[float, int]:
        if choice not in self.timed:
            self.timed[choice] = self._timed(choice)
        return self.timed[choice]

    def _timed(self, choice: Choice) -> tuple[float, int]:
        """As in `timed`. Of many micro-batches, which come at a steady pace, some are run."""
        stages = choice.size("pipe")
        few = 2 * max(2, stages)
        if choice.microbatches <= 2 * few or 2 * stages * choice.microbatches <= _ACTIONS():
            plan = self._model.assembled(choice)
            return predict_on(plan, self._machine).total, self._held(choice, plan, _ABOUT)
        plan, more = self._model.assembled(replace(choice, microbatches=few)), few + few // 2
        first, second = (predict_on(paced(plan, number), self._machine).total for number in (few, more))
        each = (second - first) / (more - few)
        return first + each * (choice.microbatches - few), self._held(choice, plan, _ABOUT)

    def _exact(self, choice: Choice) -> tuple[Plan, int]:
        """The exact plan, and the bytes that a device holds."""
        if choice not in self._planned:
            try:
                plan = self._model.exact(choice)
            except ShardlibError:
                raise
            except Exception as error:  # the loss's own: it does not run on such micro-batches, say
                raise _Unfit("cannot be traced", f"{type(error).__name__}: {error}") from error
            self._planned[choice] = plan, self._held(choice, plan, 1.0)
        return self._planned[choice]

    def _ran(self, choice: Choice) -> Found:
        """The exact plan on the clock, which takes long for many micro-batches: only of what fits."""
        if choice not in self._found:
            plan, held = self._exact(choice)
            self._found[choice] = Found(choice, predict_on(plan, self._machine).total, held, plan)
        return self._found[choice]

    def _held(self, choice: Choice, plan: Plan, about: float) -> int:
        """The peak of a rank's device under a plan that fits, at least.

        Args:
            about: how often what the plan says may be what is held.
        """
        limits = self._limits(choice)
        misfits = [use for use in limits.uses(plan) if use.bytes > about * use.limit]
        if misfits:
            worst = max(misfits, key=lambda use: use.bytes - use.limit)
            raise _Unfit(f"the plan exceeds {worst.tier.memory} memory", str(worst))
        return int(limits.peak(plan) / about)

    def _limits(self, choice: Choice) -> Limits:
        machine, batch = self._machine, self._model.batch_bytes(choice.rows * choice.microbatches)
        sharing = min(self._ranks, machine.ranks_per_host)
        limits = Limits.given(machine.memory, machine.host_memory, machine.disk, sharing, batch)
        assert limits is not None  # the device's is one
        return limits


def _followers(values: Iterable[str | None]) -> dict[str | None, str | None]:
    """Value -> the one that is tried after it: none comes first, the others as they are given."""
    order = sorted(dict.fromkeys(values), key=lambda value: value is not None)
    return dict(zip(order, [*order[1:], _NO_MORE], strict=True))

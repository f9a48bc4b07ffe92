"""The order in which choices come up: by what is known of their time, which is refined as they do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardlib.errors import ShardlibError
from shardlib.plan.machine import Machine
from shardlib.plan.plan import Plan
from shardlib.plan.prediction.step import predict_on
from shardlib.plan.records import Trace
from shardlib.plan.tiers.limits import Limits
from shardlib.search.bounds import Bounds
from shardlib.search.model import Model
from shardlib.search.space import Choice
from shardlib.search.value import Found, Rejected

_SMALLER = (0.75, 0.5)  # of the memory of the quickest plan: budgets for which a search is made again
_ACTIONS = 4096  # of a schedule: what is more of its steady part is not run on the clock


class _Unfit(Exception):
    """What rejects a choice: the kind of the reason, and the reason."""


class Searching:
    """A search, with what it has learnt so far.

    Args:
        within: the share of time that does not matter.

    Attributes:
        rejected: choice -> why.
        timed: choice -> seconds on the clock with traces put together from blocks, and bytes that are held at all times.
    """

    def __init__(self, model: Model, machine: Machine, ranks: int, choices: Sequence[Choice], within: float) -> None:
        self.choices = choices
        self.rejected: dict[Choice, Rejected] = {}
        self.timed: dict[Choice, tuple[float, int]] = {}
        self._model, self._machine, self._ranks, self._within = model, machine, ranks, within
        self._bounds = Bounds(model, machine, ranks)
        self._bounded: dict[Choice, float] = {}
        self._found: dict[Choice, Found] = {}

    def front(self) -> Iterator[Found]:
        """The quickest choice, and the quickest ones of those that hold less."""
        found = first = self.quickest(self._machine.memory)
        for share in _SMALLER:
            if found is not None:
                yield found
            smaller = first and self.quickest(int(share * first.bytes))
            found = smaller if smaller and found and smaller.bytes < found.bytes else None
        if found is not None:
            yield found

    def quickest(self, budget: int) -> Found | None:
        """The quickest choice that holds no more than a budget: each comes up in the order of what is known of its time."""
        plain, numbers, best = self._plain(), itertools.count(), None
        heap = [(self._bounds.soonest(choice, plain), next(numbers), 0, choice) for choice in self.choices]
        heapq.heapify(heap)
        while heap:
            least, _, known, choice = heapq.heappop(heap)
            if best is not None and least >= best.seconds * (1 - self._within):
                break
            if choice in self.rejected:
                continue
            try:
                if known == 2:
                    found = self._planned(choice)
                    if found.bytes <= budget and (best is None or found.seconds < best.seconds):
                        best = found
                    continue
                seconds, held = self._clocked(choice) if known else (self._bound(choice), 0)
            except (_Unfit, ShardlibError) as error:
                kind, reason = error.args if isinstance(error, _Unfit) else ("does not compose", str(error))
                self.timed.pop(choice, None)
                self.rejected[choice] = Rejected(choice, kind, reason)
            else:
                if held <= budget:
                    heapq.heappush(heap, (max(least, seconds), next(numbers), known + 1, choice))
        return best

    def _plain(self) -> Sequence[Trace]:
        """The traces of blocks on one device, for one row."""
        return self._model.blocks(Choice((), 1, 1, precision=self.choices[0].precision)).one

    def _bound(self, choice: Choice) -> float:
        """The seconds that a choice takes at least, by its blocks."""
        if choice not in self._bounded:
            if excess := self._bounds.excess(choice):
                raise _Unfit(f"{excess.what} exceed {excess.memory} memory", str(excess))
            self._bounded[choice] = self._bounds.seconds(choice)
        return self._bounded[choice]

    def _clocked(self, choice: Choice) -> tuple[float, int]:
        if choice not in self.timed:
            self.timed[choice] = self._timed(choice)
        return self.timed[choice]

    def _timed(self, choice: Choice) -> tuple[float, int]:
        """As in `timed`. Of many micro-batches, which come at a steady pace, some are run."""
        stages = choice.size("pipe")
        few = 2 * max(2, stages)
        if choice.microbatches <= 2 * few or 2 * stages * choice.microbatches <= _ACTIONS:
            plan = self._model.assembled(choice)
            return predict_on(plan, self._machine).total, _state(plan)
        more = few + few // 2
        plans = [self._model.assembled(replace(choice, microbatches=number)) for number in (few, more)]
        first, second = (predict_on(plan, self._machine).total for plan in plans)
        return first + (second - first) / (more - few) * (choice.microbatches - few), _state(plans[0])

    def _planned(self, choice: Choice) -> Found:
        """The exact plan."""
        if choice not in self._found:
            try:
                plan = self._model.exact(choice)
            except ShardlibError:
                raise
            except Exception as error:  # the loss's own: it does not run on such micro-batches, say
                raise _Unfit("cannot be traced", f"{type(error).__name__}: {error}") from error
            limits = self._limits(choice)
            misfits = [use for use in limits.uses(plan) if not use.fits]
            if misfits:
                worst = max(misfits, key=lambda use: use.bytes - use.limit)
                raise _Unfit(f"the plan exceeds {worst.tier.memory} memory", str(worst))
            self._found[choice] = Found(choice, predict_on(plan, self._machine).total, limits.peak(plan), plan)
        return self._found[choice]

    def _limits(self, choice: Choice) -> Limits:
        machine, batch = self._machine, self._model.batch_bytes(choice.rows * choice.microbatches)
        sharing = min(self._ranks, machine.ranks_per_host)
        limits = Limits.given(machine.memory, machine.host_memory, machine.disk, sharing, batch)
        assert limits is not None  # the device's is one
        return limits


def _state(plan: Plan) -> int:
    """Bytes that a device holds at all times."""
    return plan.bytes("param", "device") + plan.bytes("optimizer", "device")

"""Limits of memories: what of a plan does not fit them, how many blocks it recomputes to fit, and the change that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardlib.errors import IllegalComposition, ShardlibError, listing
from shardlib.mesh.mesh import coordinates
from shardlib.plan.deduplication import assumed
from shardlib.plan.memory import MemoryPeak, memory_peaks
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import nominal_seconds
from shardlib.plan.recompute import Recompute, fewest
from shardlib.plan.tables import parse_size, size
from shardlib.plan.transform import Transform
from shardlib.plan.value import PlanValue

_ARGUMENTS = {"device": "device_memory", "host": "host_memory", "disk": "disk"}
_TOGETHER = 4  # changes that are made together, at most
_FIRST = 12  # changes that others are tried with in pairs
_PAIRS = 16  # pairs that are traced


@dataclass(frozen=True)
class MemoryUse:
    """The use of one limited memory.

    Attributes:
        peak: of the rank that holds most.
        ranks: how many ranks share the memory.
        bytes: what they hold together, on the device or host where that is most.
        limit: bytes of the memory.
    """

    peak: MemoryPeak
    ranks: int
    bytes: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    def __str__(self) -> str:
        argument = _ARGUMENTS[self.peak.memory]
        shared = f"{self.ranks} ranks of a host hold {size(self.bytes)}, one " if self.ranks > 1 else "a rank holds "
        return f"{shared}{self.peak}; {argument}={self.limit} is {size(self.limit)}"


@dataclass(frozen=True)
class Limits:
    """Bytes that there are.

    Attributes:
        bytes: memory -> bytes, of each rank's device, of a host's memory, and of a host's disks; others are not limited.
        ranks_per_host: ranks that share a host, which are neighbours in the mesh.
        batch: bytes of a rank's batch, on the device.
    """

    bytes: Mapping[str, int]
    ranks_per_host: int
    batch: int

    @staticmethod
    def given(
        device: int | str | None, host: int | str | None, disk: int | str | None, ranks_per_host: int, batch: int
    ) -> Limits | None:
        """The limits that arguments name; None if they name none.

        Raises:
            ValueError: an argument that is no size, or fewer than one rank per host.
        """
        if not isinstance(ranks_per_host, int) or isinstance(ranks_per_host, bool) or ranks_per_host < 1:
            raise ValueError(
                f"ranks_per_host={ranks_per_host!r}: give the number of ranks that share a host, at least 1"
            )
        sizes = {"device": device, "host": host, "disk": disk}
        found = {memory: parse_size(given) for memory, given in sizes.items() if given is not None}
        return Limits(found, ranks_per_host, batch) if found else None

    @property
    def arguments(self) -> str:
        """The arguments of `shardlib.make_plan` that name these limits."""
        return ", ".join(f"{_ARGUMENTS[memory]}=" for memory in self.bytes)

    def peak(self, plan: PlanValue) -> int:
        """The peak of a rank's device memory, with its batch."""
        return max(memory_peaks(view, self.batch)["device"].bytes for view in plan.views)

    def excess(self, plan: PlanValue) -> float:
        """What is held beyond the limits, in shares of them, over all memories; 0 if the plan fits."""
        return sum(max(0, use.bytes - use.limit) / use.limit for use in self.uses(plan))

    def uses(self, plan: PlanValue) -> Iterator[MemoryUse]:
        """The use of each limited memory that holds anything."""
        by_home = [memory_peaks(view, self.batch) for view in plan.views]
        for memory, limit in self.bytes.items():
            if not (peaks := [peaks[memory] for peaks in by_home if memory in peaks]):
                continue
            most = max(peaks, key=lambda peak: peak.bytes)
            of_home = [peaks[memory].bytes if memory in peaks else 0 for peaks in by_home]
            ranks, held = (1, most.bytes) if memory == "device" else self._of_a_host(plan, of_home)
            yield MemoryUse(most, ranks, held, limit)

    def _of_a_host(self, plan: PlanValue, of_home: list[int]) -> tuple[int, int]:
        """The ranks of the host that holds most, and the bytes that they hold."""
        ranks = math.prod(plan.sizes.values())
        if len(of_home) == 1:
            sharing = min(ranks, self.ranks_per_host)
            return sharing, sharing * of_home[0]
        held = [of_home[plan.stages.home(coordinates(plan.sizes, rank))] for rank in range(ranks)]
        hosts = [held[first : first + self.ranks_per_host] for first in range(0, ranks, self.ranks_per_host)]
        fullest = max(hosts, key=sum)
        return len(fullest), sum(fullest)


def fitted(plan: Plan, traced: Callable[[Plan], Plan], limits: Limits) -> Plan:
    """The traced plan. "auto" recomputes the fewest blocks with which it fits the limits, or all blocks if none does.

    Raises:
        IllegalComposition: the loss cannot be traced.
    """

    def recomputing(how: Recompute | None) -> Plan:
        found = traced(replace(plan, step=replace(plan.step, remat=how)))
        if found.traces is None:
            notes = found.claims.notes if found.claims else ()
            why = next((note for note in notes if note.startswith("not traced: ")), "not traced").partition(": ")[2]
            raise IllegalComposition(
                f"{limits.arguments} needs a loss that can be traced, and this one cannot: {why}. Let no size or branch "
                "depend on values (torch.where, masked_fill, weights instead of selections; experts of transformers with "
                "experts_implementation='grouped_mm'), or give no limit"
            )
        return found

    how = plan.step.remat
    if how is None or how.policy != "auto":
        return recomputing(how)
    full = replace(how, policy="full")
    everything = recomputing(full)
    count = max(trace.blocks for trace in everything.traces or ())
    all_blocks = replace(plan.step, remat=replace(full, blocks=count))
    plans = {count: replace(plan, step=all_blocks, traces=everything.traces)}

    def planned(blocks: int) -> Plan:
        if blocks not in plans:
            plans[blocks] = recomputing(replace(full, blocks=blocks))
        return plans[blocks]

    budget = limits.bytes.get("device")
    chosen = 0 if budget is None else fewest(count, lambda blocks: limits.peak(planned(blocks)), budget)
    blocks = count if chosen is None else chosen
    found = planned(blocks)
    note = f"remat('auto'): {blocks} of {count} blocks are recomputed, for a peak of {size(limits.peak(found))}"
    note += f"; with none {size(limits.peak(plans[0]))}" if 0 in plans else ""
    return replace(found, claims=found.claims and found.claims.noting([note]))


# The change of a plan that does not fit which makes it fit and costs the least time, found by planning every candidate.

Changes = Callable[[Transform, Collection[str]], Iterable[Transform]]


class Candidate(NamedTuple):
    """A chain of transforms with its plan. Without a trace the plan holds more than is counted, and takes longer.

    Attributes:
        excess: what it holds beyond the limits.
        seconds: of a step.
        edits: number of changes of the chain that was given.
    """

    excess: float
    seconds: float
    edits: int
    transform: Transform
    plan: Plan


@dataclass(frozen=True)
class Planner:
    """What plans the candidates.

    Attributes:
        limits: what they are to fit.
        changes: returns the chains, of one edit each, that may hold less in the memories that hold too much.
        difference: what a user changes to come from one chain to another.
        rough: plans without a trace.
        exact: plans with one.
        holds: returns whether what such a plan was found to hold is what it does hold; else it is planned anew.
        others: returns chains as ``changes`` does, which are tried where those do not fit.
    """

    limits: Limits
    changes: Changes
    difference: Callable[[Transform, Transform, Plan], str]
    rough: Callable[[Transform], Plan]
    exact: Callable[[Transform], Plan]
    holds: Callable[[Plan], bool]
    others: Changes = lambda transform, full: ()
    _known: dict[str, Candidate | None] = field(default_factory=dict)  # what has been planned, by the code of its chain

    def refusal(self, transform: Transform, plan: Plan) -> IllegalComposition:
        """The error that names every memory which ``plan`` does not fit, and the cheapest change that fits."""
        misfits = listing([str(use) for use in self.limits.uses(plan) if not use.fits])
        notes = [note for note in (plan.claims.notes if plan.claims else ()) if note.startswith("remat('auto')")]
        start = self._weighed(0, transform, plan)
        return IllegalComposition("\n".join(["this plan does not fit:", misfits, *notes, self._advice(start)]))

    def _advice(self, start: Candidate) -> str:
        best, alone = self._best(start)
        if not self.holds(best.plan):
            self._known.clear()
            best, alone = self._best(start)
        if best.excess:
            best, alone = self._with_others(start, best)
        if not best.edits:
            return "There is no change that holds less"
        if alone and not best.excess:
            return f"The cheapest change that fits: {self._shown(best, start)}"
        none = "nor do several together that were tried; the least is held with"
        how = none if best.excess else "but together these do:"
        return f"No change fits alone, {how} {self._shown(best, start)}"

    def _best(self, start: Candidate) -> tuple[Candidate, bool]:
        """The cheapest change that fits, or what holds least; and whether changes alone were enough."""
        planned, skipped = self._alone(start)
        if fitting := [candidate for candidate in planned if not candidate.excess]:
            return min(fitting, key=lambda candidate: candidate.seconds), True
        best = self._more(self._least([start, *planned], skipped), self.changes)
        return self._pair(planned, skipped, best), False

    def _with_others(self, start: Candidate, best: Candidate) -> tuple[Candidate, bool]:
        """What ``others`` give, alone if one of them fits, or else on top of what holds least without them."""
        other = self._least([start], self._edits(start, self.others))
        if other.edits and not other.excess:
            return other, True
        return self._more(min(best, other, key=lambda candidate: candidate[:2]), self.others), False

    def _more(self, best: Candidate, changes: Changes) -> Candidate:
        """``best`` with more changes, each time the one after which least is missing."""
        while best.edits and best.excess and best.edits < _TOGETHER:
            after = self._least([best], self._edits(best, changes))
            if after is best:
                break
            best = after
        return best

    def _pair(self, planned: list[Candidate], skipped: list[Candidate], best: Candidate) -> Candidate:
        """The cheapest two changes together, or ``best`` if it is cheaper. What holds least after one change may be slow,
        where two quick ones hold as little as they must."""
        quickest = sorted([*planned, *skipped], key=lambda single: single.seconds)[:_FIRST]
        edits = (edit for single in quickest for edit in self._edits(single, self.changes) if not edit.excess)
        pairs = {repr(edit.transform): edit for edit in edits}
        for edit in sorted(pairs.values(), key=lambda edit: edit.seconds)[:_PAIRS]:
            if (best.excess or edit.seconds < best.seconds) and (candidate := self._planned(edit)):
                best = min(best, candidate, key=lambda candidate: candidate[:2])
        return best

    def _alone(self, start: Candidate) -> tuple[list[Candidate], list[Candidate]]:
        """The changes that may fit, planned up to those that take longer than one that fits; and those that hold too much
        even without a trace."""
        planned, skipped, least = [], [], math.inf
        for edit in sorted(self._edits(start, self.changes), key=lambda edit: edit.seconds):
            if edit.excess:
                skipped.append(edit)
            elif edit.seconds < least and (candidate := self._planned(edit)):
                planned.append(candidate)
                least = least if candidate.excess else min(least, candidate.seconds)
        return planned, skipped

    def _least(self, planned: list[Candidate], edits: Iterable[Candidate]) -> Candidate:
        """What holds least beyond the limits, and takes least of these; edits that cannot be it are not traced."""
        best = min(planned, key=lambda candidate: candidate[:2])
        for edit in sorted(edits, key=lambda edit: edit.seconds):
            if (edit.excess, edit.seconds) < best[:2] and (candidate := self._planned(edit)):
                best = min(best, candidate, key=lambda candidate: candidate[:2])
        return best

    def _edits(self, before: Candidate, changes: Changes) -> Iterator[Candidate]:
        """A candidate's chain with one edit, without a trace."""
        full = {use.peak.memory for use in self.limits.uses(before.plan) if not use.fits}
        for after in changes(before.transform, full):
            try:
                plan = self.rough(after)
            except ShardlibError:  # it does not compose with the other transforms
                continue
            yield self._weighed(before.edits + 1, after, replace(plan, traces=assumed(before.plan, plan)))

    def _planned(self, edit: Candidate) -> Candidate | None:
        """A candidate with its trace."""
        code = repr(edit.transform)
        if code not in self._known:
            try:
                plan = self.exact(edit.transform)
            except Exception:  # the loss does not run on smaller micro-batches, say; what it raises then is its own
                self._known[code] = None
            else:
                self._known[code] = self._weighed(edit.edits, edit.transform, plan)
        return self._known[code]

    def _weighed(self, edits: int, transform: Transform, plan: Plan) -> Candidate:
        return Candidate(self.limits.excess(plan), nominal_seconds(plan), edits, transform, plan)

    def _shown(self, candidate: Candidate, start: Candidate) -> str:
        held = listing([str(use) for use in self.limits.uses(candidate.plan)])
        code = self.difference(start.transform, candidate.transform, candidate.plan)
        slower = f"about {candidate.seconds / start.seconds:.2f} times as long" if start.seconds else "an unknown time"
        return f"{code}. A step takes {slower}, and\n{held}"

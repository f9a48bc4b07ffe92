"""The change of a plan that does not fit which makes it fit and costs the least time, found by planning every candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardlib.errors import IllegalComposition, ShardlibError, listing
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import nominal_seconds
from shardlib.plan.tiers.known import assumed
from shardlib.plan.tiers.limits import Limits
from shardlib.plan.transform import Transform

_TOGETHER = 4  # changes that are made together, at most
_FIRST = 12  # changes that others are tried with in pairs
_PAIRS = 16  # pairs that are traced
Changes = Callable[[Transform, Collection[str]], Iterable[Transform]]


class Candidate(NamedTuple):
    """A planned chain: what it holds beyond the limits, the seconds of a step, the number of its edits, and its plan."""

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
        rough: plans without a trace, and so counts too little.
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
        start = Candidate(self.limits.excess(plan), nominal_seconds(plan), 0, transform, plan)
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
        return self._pair(start, planned, skipped, best), False

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

    def _pair(self, start: Candidate, planned: list[Candidate], skipped: list[_Edit], best: Candidate) -> Candidate:
        """The cheapest two changes together, or ``best`` if it is cheaper. What holds least after one change may be slow,
        where two quick ones hold as little as they must."""
        singles = [*planned, *(Candidate(edit.excess, edit.seconds, 1, edit.after, edit.plan) for edit in skipped)]
        quickest = sorted(singles, key=lambda single: single.seconds)[:_FIRST]
        edits = (edit for single in quickest for edit in self._edits(single, self.changes) if not edit.excess)
        pairs = {repr(edit.after): edit for edit in edits}
        for edit in sorted(pairs.values(), key=lambda edit: edit.seconds)[:_PAIRS]:
            if (best.excess or edit.seconds < best.seconds) and (candidate := self._planned(edit)):
                best = min(best, candidate, key=lambda candidate: candidate[:2])
        return best

    def _alone(self, start: Candidate) -> tuple[list[Candidate], list[_Edit]]:
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

    def _least(self, planned: list[Candidate], edits: Iterable[_Edit]) -> Candidate:
        """What holds least beyond the limits, and takes least of these; edits that cannot be it are not traced."""
        best = min(planned, key=lambda candidate: candidate[:2])
        for edit in sorted(edits, key=lambda edit: edit.seconds):
            if (edit.excess, edit.seconds) < best[:2] and (candidate := self._planned(edit)):
                best = min(best, candidate, key=lambda candidate: candidate[:2])
        return best

    def _edits(self, before: Candidate, changes: Changes) -> Iterator[_Edit]:
        full = {use.tier.memory for use in self.limits.uses(before.plan) if not use.fits}
        for after in changes(before.transform, full):
            try:
                plan = self.rough(after)
            except ShardlibError:  # it does not compose with the other transforms
                continue
            plan = replace(plan, traces=assumed(before.plan, plan))
            yield _Edit(before, after, plan, self.limits.excess(plan), nominal_seconds(plan))

    def _planned(self, edit: _Edit) -> Candidate | None:
        before, after, *_ = edit
        code = repr(after)
        if code not in self._known:
            try:
                plan = self.exact(after)
            except Exception:  # the loss does not run on smaller micro-batches, say; what it raises then is its own
                self._known[code] = None
            else:
                excess, seconds = self.limits.excess(plan), nominal_seconds(plan)
                self._known[code] = Candidate(excess, seconds, before.edits + 1, after, plan)
        return self._known[code]

    def _shown(self, candidate: Candidate, start: Candidate) -> str:
        held = listing([str(use) for use in self.limits.uses(candidate.plan)])
        code = self.difference(start.transform, candidate.transform, candidate.plan)
        slower = f"about {candidate.seconds / start.seconds:.2f} times as long" if start.seconds else "an unknown time"
        return f"{code}. A step takes {slower}, and\n{held}"


class _Edit(NamedTuple):
    """A candidate, its chain with one edit, its plan without a trace, and what that holds beyond the limits and the seconds
    of a step, at least."""

    before: Candidate
    after: Transform
    plan: Plan
    excess: float
    seconds: float

"""The change of a plan that does not fit which makes it fit and costs the least time, found by planning every candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardlib.errors import IllegalComposition, ShardlibError, listing
from shardlib.plan.nominal import nominal_seconds
from shardlib.plan.plan import Plan
from shardlib.plan.tiers.limits import Limits
from shardlib.plan.transform import Transform

_TOGETHER = 4  # changes that are made together, at most


@dataclass(frozen=True)
class Change:
    """One edit of a chain of transforms.

    Attributes:
        transform: the edited chain.
        code: what a user writes, once the plan has decided what the edit left open.
    """

    transform: Transform
    code: Callable[[Plan], str]


class Candidate(NamedTuple):
    """A planned chain: what it holds beyond the limits, the seconds of a step, the code of its changes, and its plan."""

    excess: float
    seconds: float
    codes: tuple[str, ...]
    transform: Transform
    plan: Plan


@dataclass(frozen=True)
class Planner:
    """What plans the candidates.

    Attributes:
        limits: what they are to fit.
        changes: returns the edits of a chain that may save memory.
        rough: plans without a trace, and so counts too little.
        exact: plans with one.
    """

    limits: Limits
    changes: Callable[[Transform], Iterable[Change]]
    rough: Callable[[Transform], Plan]
    exact: Callable[[Transform], Plan]

    def refusal(self, transform: Transform, plan: Plan) -> IllegalComposition:
        """The error that names every memory which ``plan`` does not fit, and the cheapest change that fits."""
        misfits = listing([str(use) for use in self.limits.uses(plan) if not use.fits])
        notes = [note for note in (plan.claims.notes if plan.claims else ()) if note.startswith("remat('auto')")]
        start = Candidate(self.limits.excess(plan), nominal_seconds(plan), (), transform, plan)
        return IllegalComposition("\n".join(["this plan does not fit:", misfits, *notes, self._advice(start)]))

    def _advice(self, start: Candidate) -> str:
        planned, skipped = self._alone(start)
        if fitting := [candidate for candidate in planned if not candidate.excess]:
            best = min(fitting, key=lambda candidate: candidate.seconds)
            return f"The cheapest change, of {len(fitting)} that fit: {self._shown(best, start)}"
        best = self._least([start, *planned], skipped)
        while best.codes and best.excess and len(best.codes) < _TOGETHER:
            after = self._least([best], self._edits(best))
            if after is best:
                break
            best = after
        if not best.codes:
            return "There is no change that holds less"
        how = "nor do several; the least is held with" if best.excess else "but together these do:"
        return f"No change fits alone, {how} {self._shown(best, start)}"

    def _alone(self, start: Candidate) -> tuple[list[Candidate], list[_Edit]]:
        """The changes that may fit, planned; and those that hold too much even without a trace."""
        planned, skipped = [], []
        for edit in self._edits(start):
            if edit.excess:
                skipped.append(edit)
            elif candidate := self._planned(edit):
                planned.append(candidate)
        return planned, skipped

    def _least(self, planned: list[Candidate], edits: Iterable[_Edit]) -> Candidate:
        """What holds least beyond the limits; edits that must hold more than what is known are not traced."""
        best = min(planned, key=lambda candidate: candidate[:2])
        for edit in edits:
            if edit.excess <= best.excess and (candidate := self._planned(edit)):
                best = min(best, candidate, key=lambda candidate: candidate[:2])
        return best

    def _edits(self, before: Candidate) -> Iterator[_Edit]:
        for change in self.changes(before.transform):
            try:
                yield _Edit(before, change, self.limits.excess(self.rough(change.transform)))
            except ShardlibError:  # it does not compose with the other transforms
                continue

    def _planned(self, edit: _Edit) -> Candidate | None:
        before, change, _ = edit
        try:
            plan = self.exact(change.transform)
        except Exception:  # the loss does not run on smaller micro-batches, say; what it raises then is its own
            return None
        codes = (*before.codes, change.code(plan))
        return Candidate(self.limits.excess(plan), nominal_seconds(plan), codes, change.transform, plan)

    def _shown(self, candidate: Candidate, start: Candidate) -> str:
        held = listing([str(use) for use in self.limits.uses(candidate.plan)])
        slower = candidate.seconds / start.seconds if start.seconds else 1.0
        return f"{'; '.join(candidate.codes)}. A step takes about {slower:.2f} times as long, and\n{held}"


class _Edit(NamedTuple):
    """A change of a candidate, and what it holds beyond the limits, at least."""

    before: Candidate
    change: Change
    excess: float

"""What the runs of one function showed so far, and how the ranks agree on what comes next.

Exchanges are paired by their order alone, and a rank cannot know what another one's batch makes it use. So the ranks
agree on each exchange of the first run. Where all did the same, later runs do as that one did without asking. A rank
that leaves this trace still makes the trace's exchanges, and computes nonsense meanwhile; when the step is over all
hear of it, throw the step's numbers away, and take it again, agreeing on each exchange. They go on so until runs have
been alike for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from shardlib._compat import no_modes
from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan

_log = logging.getLogger("shardlib.execute")

# A unit that was touched (None: the end of a forward, or of half a backward), and how many reductions had been started.
Entry = tuple[str | None, int]

_CALM = 8  # runs that must be alike before the ranks, which had been apart, trust the trace again


class Record:
    """Shared by the executors that run the same function.

    Attributes:
        trace: what the last run that was alike on all ranks did; None before the first.
        order: trained units in the order their reductions start; None before the first backward.
        late: of that run, the buckets whose gradient reached handles themselves after their reduction had started.
        strayed: whether this rank left the trace in the present step.
        done: the steps of `shardlib.execute.sequence` that the function took.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self.trace: list[Entry] | None = None
        self.order: list[str] | None = None
        self.late: tuple[str, ...] = ()
        self.strayed = False
        self.done: set[str] = set()
        self._alike, self._needed = 0, 1  # runs that were alike in a row, and how many it takes to trust their trace
        self._told: set[str] = set()

    @property
    def agreeing(self) -> bool:
        """Whether the ranks agree on each exchange of a run that begins now."""
        return self.trace is None or self._alike < self._needed

    def compare(self, *word: int) -> list[tuple[int, ...]]:
        """Every rank's ``word``, numbers of 31 bits. All ranks that run the same call it together."""
        if self._mesh.abstract:  # one rank alone, on tensors without values
            return [word]
        with no_modes(), torch.inference_mode(False):
            words = torch.tensor([word], dtype=torch.int32, device=self._mesh.device)
            for axis in self._plan.uniform_axes:
                if self._mesh.shape[axis] > 1:
                    everyone = words.new_empty(self._mesh.shape[axis] * len(words), len(word))
                    primitives.all_gather(self._mesh, axis, everyone, words, scalars=True).wait()
                    words = everyone
        return [tuple(row) for row in words.tolist()]

    def settle(self, started: Sequence[str], touched: Iterable[str]) -> None:
        """Agree on the order of reductions, where the ranks' own differ: what is touched last comes first."""
        lists = primitives.all_gather_object(self._mesh, self._plan.uniform_axes, list(dict.fromkeys(touched)))
        places: dict[str, list[float]] = {}
        for names in lists:
            for place, name in enumerate(names):
                places.setdefault(name, []).append(place / len(names))
        means = {name: sum(found) / len(found) for name, found in places.items()}
        units = list(self._plan.trained_in)
        rest = sorted(units, key=lambda unit: (means.get(unit, 1.0), units.index(unit)), reverse=True)
        self.order = [*started, *(unit for unit in rest if unit not in started)]

    def unite(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names that any rank gives. All ranks that run the same call it together."""
        lists = primitives.all_gather_object(self._mesh, self._plan.uniform_axes, list(names))
        return tuple(sorted({name for names in lists for name in names}))

    def note(self, runs: list[Entry], late: tuple[str, ...], apart: set[str] | None) -> None:
        """A run that the ranks agreed on is over; ``apart``: units that they used otherwise, None where alike."""
        if apart is None:
            self._alike = self._alike + 1 if runs == self.trace else 1
            self.trace, self.late = list(runs), late
            return
        self._alike, self._needed = 0, max(self._needed, _CALM)
        if apart - self._told:
            self._told |= apart
            _log.warning(
                "the ranks differ in whether or when they use %s: what one uses all gather, and they agree on each gather",
                ", ".join(sorted(self._told)),
            )

    def meet(self) -> bool:
        """Whether any rank strayed; then the run is to be taken again, and the ranks agree on its exchanges."""
        strayed = torch.tensor([float(self.strayed)], device=self._mesh.device)
        sum_over(self._mesh, self._plan.uniform_axes, strayed)
        if strayed.item():
            self.distrust()
        return bool(strayed.item())

    def distrust(self) -> None:
        """A rank left the trace. Each time it takes more runs until a trace is trusted again."""
        self.strayed = False
        self._alike, self._needed = 0, max(2 * self._needed, _CALM)

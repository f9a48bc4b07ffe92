"""The record of a function's runs, by which ranks agree on the order of their exchanges.

Ranks pair their exchanges by order alone, and a rank cannot know which units another rank's batch makes it use. So the
ranks agree on each exchange of the first run before they make it. If all ranks did the same, that run is the trace, and
later runs follow it without agreeing. A rank that leaves the trace still makes the trace's exchanges, with meaningless
values; at the end of the step all ranks learn of it, discard the step's numbers, and take the step again, agreeing on
each exchange. They go on agreeing until a number of runs in a row were the same."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.common._compat import no_modes
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan

_log = logging.getLogger("shardlib.execute")

# A unit that was touched (None: the end of a forward, or of half a backward), and how many reductions had been started.
Visit = tuple[str | None, int]

_CALM = 8  # equal runs in a row after which ranks that had differed trust the trace again


class Record:
    """The record of one function's runs, shared by the executors that run the function.

    Attributes:
        trace: the last run that was the same on all ranks; None before the first.
        order: trained units in the order in which their reductions start; None before the first backward.
        late: buckets of which, in the trace, a gradient arrived at handles after the bucket's reduction had started.
        strayed: whether this rank left the trace in the present step.
        names: the names that the function has given to values.
        updates: the operators by which the function updated running statistics in its first run.
        layer_tokens: tokens that layers saw in the present step, of all micro-batches and layers of this rank together;
            counted where the plan leaves out parts of layers.
        done: the steps of `shardlib.execute.sequence` that the function took.
        holds: whether what the graph keeps of gathered parameters stays there until backward, as the function calls
            `torch.func`, whose transforms allow no hooks on saved tensors. Else backward gathers it again.
    """

    strayed: bool

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan.tiled, mesh
        self.trace: list[Visit] | None = None
        self.order: list[str] | None = None
        self.late: tuple[str, ...] = ()
        self.strayed = False
        self.names: set[str] = set()
        self.updates: set[str] = set()
        self.done: set[str] = set()
        self.holds = False
        self.layer_tokens = 0
        self._equal_runs, self._needed = 0, 1  # equal runs in a row, and how many it takes to trust the trace
        self._warned: set[str] = set()  # units of which the log says that ranks use them differently

    @property
    def agreeing(self) -> bool:
        """Whether the ranks agree on each exchange of a run that begins now."""
        return self.trace is None or self._equal_runs < self._needed

    def less(self, skipped: frozenset[str]) -> list[Visit] | None:
        """The trace of a run that leaves out these units."""
        if self.trace is None or not skipped:
            return self.trace
        order = self.order or []
        gone = [0, *itertools.accumulate(unit in skipped for unit in order)]  # of the first n reductions
        return [(name, count - gone[count]) for name, count in self.trace if name not in skipped]

    def late_of(self, skipped: frozenset[str]) -> tuple[str, ...]:
        """`late` in a run that leaves out these units."""
        return tuple(name for name in self.late if self._plan.bucket_of[name].unit not in skipped)

    @naming("the agreement on gathers")
    def compare(self, *word: int) -> list[tuple[int, ...]]:
        """The ``word`` (31-bit numbers) of every rank that runs the same code. Collective over those ranks."""
        if self._mesh.abstract:  # a single rank, on tensors without values
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
        """Agree on one order of reductions if ranks touch units in different orders: the unit touched last comes first."""
        lists = primitives.all_gather_object(self._mesh, self._plan.uniform_axes, list(dict.fromkeys(touched)))
        positions: dict[str, list[float]] = {}
        for names in lists:
            for position, name in enumerate(names):
                positions.setdefault(name, []).append(position / len(names))
        means = {name: sum(of_ranks) / len(of_ranks) for name, of_ranks in positions.items()}
        units = list(self._plan.trained_in)
        rest = sorted(units, key=lambda unit: (means.get(unit, 1.0), units.index(unit)), reverse=True)
        self.order = [*started, *(unit for unit in rest if unit not in started)]

    def unite(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names that any rank gives. Collective over the ranks that run the same code."""
        lists = primitives.all_gather_object(self._mesh, self._plan.uniform_axes, list(names))
        return tuple(sorted({name for names in lists for name in names}))

    def note(self, visits: list[Visit], late: tuple[str, ...], differing: set[str] | None) -> None:
        """Record a run in which the ranks agreed on each exchange.

        Args:
            differing: units that the ranks used differently; None if all ranks did the same.
        """
        if differing is None:
            self._equal_runs = self._equal_runs + 1 if visits == self.trace else 1
            self.trace, self.late = list(visits), late
            return
        self._equal_runs, self._needed = 0, max(self._needed, _CALM)
        if differing - self._warned:
            self._warned |= differing
            labels = {bucket.unit: bucket.label for bucket in self._plan.tiled.buckets}
            _log.warning(
                "the ranks differ in whether or when they use %s: what one uses all gather, and they agree on each gather",
                ", ".join(sorted(labels[unit] for unit in self._warned)),
            )

    @naming("the agreement on gathers")
    def any_strayed(self) -> bool:
        """Whether any rank strayed, so that the run is repeated with agreement on its exchanges. Collective."""
        strayed = torch.tensor([float(self.strayed)], device=self._mesh.device)
        sum_over(self._mesh, self._plan.uniform_axes, strayed)
        if strayed.item():
            self.distrust()
        return bool(strayed.item())

    def distrust(self) -> None:
        """Agree on each exchange again, as a rank left the trace. Each time trust takes more equal runs."""
        self.strayed = False
        self._equal_runs, self._needed = 0, max(2 * self._needed, _CALM)

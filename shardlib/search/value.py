"""The result of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.common.display.colours import BLUE
from shardlib.common.optional import new_figure, save_figure
from shardlib.plan.plan import Plan
from shardlib.plan.tables import shortened, size, table
from shardlib.search.space import Choice

_SHOWN = 5  # kinds of reasons
_LINE = 120  # characters of a reason that is printed


@dataclass(frozen=True)
class Found:
    """A choice whose plan fits the machine.

    Attributes:
        seconds: of a step, on the virtual clock.
        bytes: the peak of a rank's device memory, with its batch.
        plan: with its traces.
        rules: of tensor slicing, or None.
    """

    choice: Choice
    seconds: float
    bytes: int
    plan: Plan = field(repr=False)
    rules: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def code(self) -> str:
        """Python that makes the plan, where ``sl`` is shardlib; ``batch`` is one rank's share."""
        mesh = ", ".join(f"{axis}={number}" for axis, number in self.choice.sizes)
        return (
            f"sl.make_plan(params, sl.abstract_mesh({mesh}), {self.choice.transform(self.rules)!r}, "
            "loss_fn=loss_fn, batch=batch, optimizer=optimizer)"
        )


class Rejected(NamedTuple):
    """A choice that is not for this machine.

    Attributes:
        kind: of the reason, in words.
        reason: the one that binds, in full.
    """

    choice: Choice
    kind: str
    reason: str


@dataclass(frozen=True)
class Search:
    """What a search has found; ``print`` it.

    Attributes:
        front: the quickest choice, and quicker ones than any other that holds as little: from the quickest to the smallest.
        rejected: choices that do not fit, or do not go together.
        slower: the number of choices that are known to take longer than the first of the front: by a bound, or since they
            recompute or offload what need not be.
        planned: the number of choices whose step was run on the virtual clock.
        within: the share of time by which another choice might be quicker than the first of the front, at most.
    """

    front: tuple[Found, ...]
    rejected: tuple[Rejected, ...]
    slower: int
    planned: int
    within: float

    @property
    def winner(self) -> Found:
        """The quickest choice that fits.

        Raises:
            ValueError: none fits.
        """
        if not self.front:
            raise ValueError(f"no choice fits:\n{self._reasons()}")
        return self.front[0]

    @property
    def considered(self) -> int:
        return self.slower + self.planned + len(self.rejected)

    def __str__(self) -> str:
        counts = f"{self.considered:,} choices: {len(self.rejected):,} rejected, {self.slower:,} known to be slower, "
        lines = [counts + f"{self.planned:,} planned"]
        if self.front:
            rows = [(f"{f.seconds:.4g} s", size(f.bytes), str(f.choice)) for f in self.front]
            lines += ["", table(("step", "memory", "choice"), rows), "", self.front[0].code]
        return "\n".join([*lines, "", self._reasons()] if self.rejected else lines)

    def _reasons(self) -> str:
        """How often each kind of reason bound, and the first of each kind."""
        counts = Counter(each.kind for each in self.rejected)
        firsts = {
            kind: next(each for each in self.rejected if each.kind == kind) for kind, _ in counts.most_common(_SHOWN)
        }
        rows = [
            (f"{counts[kind]:,}", kind, f"{shortened(each.reason.splitlines()[0], _LINE)} ({each.choice})")
            for kind, each in firsts.items()
        ]
        return table(("rejected", "because", "for example"), rows)

    def draw(self, path: str | Path) -> None:
        """Writes a PNG of the front: seconds of a step against bytes of a rank's device.

        Raises:
            MissingPackage: matplotlib is not installed; the message says what to install.
            ValueError: no choice fits.
        """
        _ = self.winner
        figure = new_figure(7.0, 4.2)
        axes = figure.subplots()
        memory, seconds = [f.bytes / 1e9 for f in self.front], [f.seconds for f in self.front]
        axes.step(memory, seconds, where="post", color="#9db4cf", linewidth=1.5)
        axes.plot(memory, seconds, "o", color=BLUE)
        for number, found in enumerate(self.front, 1):
            axes.annotate(str(number), (memory[number - 1], seconds[number - 1]), (5, 5), textcoords="offset points")
            axes.plot([], [], " ", label=f"{number}: {found.choice}")
        axes.set_xlabel("peak of a rank's device, GB")
        axes.set_ylabel("seconds of a step")
        axes.set_title("the quickest plan for each peak of memory")
        axes.margins(0.15)
        figure.legend(loc="outside lower left", fontsize=9, frameon=False, handlelength=0)
        save_figure(figure, path)

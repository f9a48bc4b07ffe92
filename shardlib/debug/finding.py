"""What a comparison finds: the first thing that differs, in the order of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardlib.debug.difference import Difference

# The parts of a step, in order.
PHASES = ("placing", "forward", "backward", "reduction", "norm", "update", "gather after the update")


@dataclass(frozen=True)
class Finding:
    """A value that a plan gives, and one device does not.

    Attributes:
        phase: one of `PHASES`.
        operation: what gives the value, from values that are still right.
        step: number of the step, from 0.
        block: the block that it is in, or "".
        leaf: path of the parameter that it is of, or "".
        microbatch: number of the micro-batch among all ranks', or None.
        ranks: on which the value differs.
        difference: how much.
        where: the line of code that calls the operation, or "".
        note: what else is known.
        plan: which plan it is of.
    """

    phase: str
    operation: str
    step: int
    difference: Difference
    ranks: tuple[int, ...] = ()
    block: str = ""
    leaf: str = ""
    microbatch: int | None = None
    where: str = ""
    note: str = ""
    plan: str = field(default="", compare=False)

    def __str__(self) -> str:
        error, limit, largest = self.difference
        lines = [
            f"step {self.step}, {self.phase}: {self.operation}",
            f"  differs by {error:.3g} on {ranks_named(self.ranks)}; the largest value is {largest:.3g}, and rounding is up "
            f"to {limit:.1g}",
        ]
        lines += [f"  leaf {self.leaf}"] * bool(self.leaf)
        lines += [f"  block {self.block}"] * bool(self.block)
        lines += [f"  micro-batch {self.microbatch}"] * (self.microbatch is not None)
        lines += [f"  called at {self.where}"] * bool(self.where)
        lines += [f"  {self.note}"] * bool(self.note)
        return "\n".join(lines)


def ranks_named(ranks: Iterable[int]) -> str:
    """Ranks as text: "rank 1, 3"."""
    return f"rank {', '.join(map(str, sorted(ranks)))}" if ranks else "all ranks"


def worst(differences: Iterable[tuple[int, Difference]]) -> tuple[tuple[int, ...], Difference] | None:
    """The ranks on which a value differs, and the largest difference; None if it is rounding everywhere."""
    bad = [(rank, each) for rank, each in differences if each.matters]
    return (tuple(sorted({rank for rank, _ in bad})), max((each for _, each in bad))) if bad else None

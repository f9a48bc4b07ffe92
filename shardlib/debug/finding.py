"""The first thing that differs, in the order of a step; the size of a difference, and up to which it is rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_FACTOR, _POWER = 8.0, 0.75
FLOOR = 1e-5  # added to the largest value: what is smaller by as much counts as 0


class Difference(NamedTuple):
    """The largest difference between elements of two tensors.

    Attributes:
        error: of a value and the one that it is to be; infinite if only one of them is finite, or the shapes differ.
        limit: up to which a difference is rounding.
        largest: of the values that are to be, without sign.
    """

    error: float
    limit: float
    largest: float

    @property
    def matters(self) -> bool:
        return self.error > self.limit


def tolerance(dtype: torch.dtype) -> float:
    """The share of the largest value up to which a difference is rounding: 8·ε^¾, for sums of a few thousand products.

    >>> from shardlib.debug.finding import tolerance
    >>> [f"{tolerance(dtype):.0e}" for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    ['1e-11', '5e-05', '2e-01']
    """
    return _FACTOR * torch.finfo(dtype).eps ** _POWER if dtype.is_floating_point else 0.0


def difference(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None = None) -> Difference:
    """The difference of ``found`` from ``wanted``, of one shape.

    Args:
        dtype: in which they were computed; by default the narrower one of theirs.
    """
    if found.shape != wanted.shape:
        return Difference(float("inf"), 0.0, float("inf"))
    if dtype is None:
        dtype = max(found.dtype, wanted.dtype, key=tolerance)
    if not found.numel():
        return Difference(0.0, 0.0, 0.0)
    a, b = (value.detach().double() for value in (found, wanted))
    largest = b.abs().nan_to_num(posinf=0.0).max().item()
    limit = tolerance(dtype) * (largest + FLOOR)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    return Difference(apart.max().item(), limit, largest)


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

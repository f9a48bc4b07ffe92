"""Gradients on their way from the device, and how many there may be.

A gradient holds memory of the device until it has arrived; one that goes to files also holds memory of the host, of which
there is a limit. What must arrive before the next may leave depends on the plan alone, not on how quick a disk is, so that
the plan can say what is held.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shardlib.common.disk import BLOCK, whole_blocks
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.transfers import Transfer
from shardlib.plan.buckets import Bucket
from shardlib.plan.memory import resting_gradients
from shardlib.plan.plan import Plan


class Flight(NamedTuple):
    """A gradient, or a ``further`` summand of one, that is on its way from the device."""

    bucket: Bucket
    transfer: Transfer
    numel: int
    further: bool


class Flights:
    """The gradients that are on their way from the device, in the order in which they left and arrive."""

    def __init__(self, plan: Plan) -> None:
        self._flying: deque[Flight] = deque()
        self._most, self._window = plan.most_in_flight, resting_gradients(plan)

    @property
    def first(self) -> Flight | None:
        """The one that arrives next."""
        return self._flying[0] if self._flying else None

    @property
    def landed(self) -> bool:
        """Whether the first has arrived."""
        return self.first is not None and self.first.transfer.done

    @property
    def crowded(self) -> bool:
        """Whether so many are on their way that the first must arrive."""
        return sum(flight.numel for flight in self._flying) > self._most

    def in_the_way(self, bucket: Bucket, further: bool) -> bool:
        """Whether the first must arrive before a gradient may leave for a file: a summand of the same sum is on its way, or
        those on their way hold the memory that it passes through."""
        held = sum(_staged(flight.bucket, flight.further) for flight in self._flying)
        same = further and any(flight.bucket is bucket for flight in self._flying)
        return bool(self._flying) and (same or held + _staged(bucket, further) > self._window)

    def begin(self, flight: Flight) -> None:
        self._flying.append(flight)

    def end(self) -> Flight:
        """The first, which is on its way no more."""
        return self._flying.popleft()


def _staged(bucket: Bucket, further: bool) -> int:
    """Bytes of host memory that a gradient passes through on its way to a file: its own, and those of the sum so far."""
    if not MEMORIES[bucket.memory.grad].rests:
        return 0
    return (1 + further) * max(BLOCK, whole_blocks(bucket.owned * bucket.reduce_dtype.itemsize))

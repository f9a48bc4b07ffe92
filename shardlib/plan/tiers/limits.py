"""The limits of a rank's device and of a host, and what of a plan does not fit them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlib.mesh.mesh import coordinates
from shardlib.plan.tables import parse_size, size
from shardlib.plan.tiers.held import Tier, tiers_of
from shardlib.plan.value import PlanValue

_ARGUMENTS = {"device": "device_memory", "host": "host_memory", "disk": "disk"}


@dataclass(frozen=True)
class MemoryUse:
    """The use of one limited memory.

    Attributes:
        tier: what a rank holds that holds most.
        ranks: how many ranks share the memory.
        bytes: what they hold together, on the device or host where that is most.
        limit: bytes of the memory.
    """

    tier: Tier
    ranks: int
    bytes: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    def __str__(self) -> str:
        argument = _ARGUMENTS[self.tier.memory]
        shared = f"{self.ranks} ranks of a host hold {size(self.bytes)}, one " if self.ranks > 1 else "a rank holds "
        return f"{shared}{self.tier}; {argument}={self.limit} is {size(self.limit)}"


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
        return max(tiers_of(view, self.batch)["device"].bytes for view in plan.views)

    def excess(self, plan: PlanValue) -> float:
        """What is held beyond the limits, in shares of them, over all memories; 0 if the plan fits."""
        return sum(max(0, use.bytes - use.limit) / use.limit for use in self.uses(plan))

    def uses(self, plan: PlanValue) -> Iterator[MemoryUse]:
        """The use of each limited memory that holds anything."""
        by_home = [tiers_of(view, self.batch) for view in plan.views]
        for memory, limit in self.bytes.items():
            tiers = [tiers[memory] for tiers in by_home if memory in tiers]
            if not tiers:
                continue
            most = max(tiers, key=lambda tier: tier.bytes)
            ranks, held = (1, most.bytes) if memory == "device" else self._of_a_host(plan, by_home, memory)
            yield MemoryUse(most, ranks, held, limit)

    def _of_a_host(self, plan: PlanValue, by_home: list[dict[str, Tier]], memory: str) -> tuple[int, int]:
        """The ranks of the host that holds most in a memory, and the bytes that they hold."""
        of_home = [tiers[memory].bytes if memory in tiers else 0 for tiers in by_home]
        ranks = math.prod(plan.sizes.values())
        if len(of_home) == 1:
            sharing = min(ranks, self.ranks_per_host)
            return sharing, sharing * of_home[0]
        held = [of_home[plan.stages.home(coordinates(plan.sizes, rank))] for rank in range(ranks)]
        hosts = [held[first : first + self.ranks_per_host] for first in range(0, ranks, self.ranks_per_host)]
        fullest = max(hosts, key=sum)
        return len(fullest), sum(fullest)

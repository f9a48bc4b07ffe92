"""Transforms: values that contribute to a plan by claims, and chains of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.plan.claims import Claim, LeafInfo
from shardlib.plan.resolved import Resolved


class Transform(ABC):
    """A value that contributes to a plan: ``claims``, a pure function of the mesh's sizes and the leaves.

    Attributes:
        name: as a user writes it, such as "zero(stage=3, axis='data')"; stands in messages and in the plan's log.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        """What it says about these leaves on a mesh of these sizes."""

    def check(self, resolved: Resolved) -> None:  # noqa: B027  # most ask nothing of the others
        """Refuse what other transforms said, or did not say, by `IllegalComposition`; called when all is resolved."""


@dataclass(frozen=True)
class Chain(Transform):
    """Several transforms as one. Order-free: every permutation gives the same plan."""

    transforms: tuple[Transform, ...]

    @property
    def name(self) -> str:
        return f"chain({', '.join(transform.name for transform in self.transforms)})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for transform in self.transforms:
            yield from transform.claims(sizes, leaves)


def chain(*transforms: Transform) -> Chain:
    """Compose transforms. Nested chains flatten; the order does not matter.

    >>> parts = sl.zero(2), sl.precision("bf16"), sl.accumulate(4)
    >>> plan = sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*parts))
    >>> plan == sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*reversed(parts)))
    True
    """
    flat: list[Transform] = []
    for transform in transforms:
        flat.extend(transform.transforms if isinstance(transform, Chain) else [transform])
    return Chain(tuple(flat))

"""Transforms: values that contribute to a plan by claims, and chains of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.claims import Claim, LeafInfo
from shardlib.plan.resolved import Resolved
from shardlib.plan.tables import shortened


class Transform(ABC):
    """A value that contributes claims to a plan.

    Attributes:
        name: the transform as a user writes it, such as "zero(3, replicate='node')", for messages and the plan's log.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        """The claims on these leaves, for a mesh with axes of these sizes. Pure."""

    def over(self, axis: str, other: str) -> str:
        """The transform as a user writes it, with another axis in the place of one."""
        return self.name.replace(repr(axis), repr(other))

    def check(self, resolved: Resolved) -> None:  # noqa: B027  # most transforms depend on no other
        """Raise `IllegalComposition` if the claims of all transforms together do not suit this one."""


@dataclass(frozen=True, repr=False)
class Chain(Transform):
    """Several transforms as one. Every order of them gives the same plan."""

    transforms: tuple[Transform, ...]

    @property
    def name(self) -> str:
        return f"chain({', '.join(transform.name for transform in self.transforms)})"

    def __repr__(self) -> str:
        return f"sl.chain({', '.join(map(repr, self.transforms))})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for transform in self.transforms:
            yield from transform.claims(sizes, leaves)


def require_transform(given: Any) -> Transform:
    """What is given, which must be a transform.

    Raises:
        IllegalComposition: it is something else.
    """
    if isinstance(given, Transform):
        return given
    remedy = (
        "give several to shardlib.chain" if isinstance(given, (list, tuple)) else "a stage is stage=, or sl.zero(stage)"
    )
    raise IllegalComposition(f"{shortened(repr(given), 120)} is no transform, as sl.zero(...) makes one; {remedy}")


def chain(*transforms: Transform) -> Chain:
    """Compose transforms. Nested chains are flattened; the order does not matter.

    Raises:
        IllegalComposition: something that is no transform.

    >>> transforms = sl.zero(2), sl.precision("bf16"), sl.accumulate(4)
    >>> plan = sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*transforms))
    >>> plan == sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*reversed(transforms)))
    True
    """
    flat: list[Transform] = []
    for transform in map(require_transform, transforms):
        flat.extend(transform.transforms if isinstance(transform, Chain) else [transform])
    return Chain(tuple(flat))

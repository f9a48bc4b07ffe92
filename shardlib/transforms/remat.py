"""Activation recompute per block (arXiv 1604.06174; selective policies as in torch's checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.transform import Transform


@dataclass(frozen=True)
class Remat(Transform):
    """The transform that `remat` makes, with the arguments given there."""

    policy: str | Callable[..., Any]

    @property
    def name(self) -> str:
        return (
            f"remat({self.policy if isinstance(self.policy, str) else getattr(self.policy, '__name__', self.policy)!r})"
        )

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(remat=self.policy)


def remat(policy: str | Callable[..., Any] = "full") -> Remat:
    """Recompute the activations of every `shardlib.block` in backward instead of keeping them.

    Args:
        policy: "full" keeps only a block's inputs; "dots" also keeps the results of matrix products and
            attention; or a policy function ``(context, op, *args, **kwargs) -> CheckpointPolicy`` of
            torch.utils.checkpoint.

    Raises:
        IllegalComposition: an unknown policy.

    >>> params = sl.shard({"w": torch.ones(8, 8)}, sl.make_mesh(), sl.chain(sl.zero(0), sl.remat("dots")))
    """
    if policy not in ("full", "dots") and not callable(policy):
        raise IllegalComposition(f"remat policy {policy!r} is not 'full', 'dots' or a policy function")
    return Remat(policy)

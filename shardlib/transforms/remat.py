"""Activation recompute per block (arXiv 1604.06174; selective policies as in torch's checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.recompute import SMALLEST, Recompute
from shardlib.plan.transform import Transform


@dataclass(frozen=True)
class Remat(Transform):
    """The transform that `remat` makes."""

    how: Recompute

    @property
    def name(self) -> str:
        return f"remat({self.how.arguments})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(remat=self.how)


def remat(policy: str | Callable[..., Any] = "full", *, store: str = "device", smallest: int = SMALLEST) -> Remat:
    """Recompute the activations of every `shardlib.block` in backward instead of keeping them.

    Args:
        policy: "full" keeps only a block's inputs; "dots" also keeps the results of matrix products and
            attention; or a policy function ``(context, op, *args, **kwargs) -> CheckpointPolicy`` of
            torch.utils.checkpoint.
        store: where a block's inputs are kept until backward. "device": where they are. "host": in pinned host memory. They
            are moved while the block computes, and brought back while the block after it is recomputed. So it is for
            inputs of checkpoints that a model makes itself (transformers' ``gradient_checkpointing_enable``). What requires
            no gradient (batches, masks) stays, and an input that several blocks share is moved once. Where the mesh is on
            the CPU, nothing is moved.
        smallest: bytes below which an input stays on the device.

    Raises:
        IllegalComposition: an unknown policy or store.

    >>> params = sl.shard({"w": torch.ones(8, 8)}, sl.make_mesh(), sl.chain(sl.zero(0), sl.remat("dots", store="host")))
    """
    if policy not in ("full", "dots") and not callable(policy):
        raise IllegalComposition(f"remat policy {policy!r} is not 'full', 'dots' or a policy function")
    if store not in ("device", "host"):
        raise IllegalComposition(f"remat store {store!r} is not 'device' or 'host'")
    return Remat(Recompute(policy, store == "host", smallest))

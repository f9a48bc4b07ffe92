"""Gradient accumulation: each rank's batch is cut into several micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.plan.arguments import choice, integer
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.conditions import require_split_gradients
from shardlib.plan.transform import Resolved

SYNC = (None, "each", "last")  # when gradients are reduced


@dataclass(frozen=True, repr=False)
class Accumulate(CodedTransform):
    """The transform that `accumulate` makes, with the arguments given there."""

    microbatches: int
    sync: str | None

    @property
    def call(self) -> CodeCall:
        return CodeCall(accumulate, {"n": self.microbatches, "sync": self.sync})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(microbatches=self.microbatches, sync=self.sync)

    def check(self, resolved: Resolved) -> None:
        require_split_gradients(resolved)


def accumulate(n: int, sync: str | None = None) -> Accumulate:
    """Cut each rank's batch into ``n`` micro-batches along dimension 0 and sum their gradients.

    Args:
        n: number of micro-batches, at least 1.
        sync: when gradients are reduced over ranks. "each": after every micro-batch, into their shards (ZeRO stages
            2 and 3: least memory). "last": once, after the last micro-batch; gradients are kept whole until then (least
            traffic). By default "each" where gradients are split and "last" where they are whole.

    Raises:
        IllegalComposition: ``n`` or ``sync`` out of range; when a plan is made, ``sync="each"`` with gradients that are
            not split.

    >>> parallel = sl.chain(sl.zero(2), sl.accumulate(4))
    >>> sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), parallel).step.microbatches
    4
    """
    n = integer("accumulate", "n", n)
    return Accumulate(n, choice("accumulate", "sync", sync, SYNC))

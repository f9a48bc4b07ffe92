"""Sequence parallelism: activations cut along the sequence over a mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition
from shardlib.nn.sequence import KINDS, SequencePlan
from shardlib.plan.claims import Claim, LeafInfo, Step, Transform
from shardlib.plan.resolve import Resolved


@dataclass(frozen=True)
class SequenceParallel(Transform):
    plan: SequencePlan

    @property
    def name(self) -> str:
        return f"sequence(axis={self.plan.axis!r}, kind={self.plan.kind!r})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(sequence=self.plan)

    def check(self, resolved: Resolved) -> None:
        axis, kind = self.plan.axis, self.plan.kind
        if kind == "megatron" and not resolved.sliced_over(axis):
            raise IllegalComposition(
                f"sequence(axis={axis!r}, kind={kind!r}) changes the exchanges of layers that are sliced over {axis!r}, and "
                f"none is: add tensor_slicing(rules, axis={axis!r}), or use kind='ulysses' or 'ring', which need none"
            )


def sequence(axis: str, kind: str = "ulysses") -> SequenceParallel:
    """Cut activations along the sequence (dimension 1) over ``axis``. The ranks along it share one batch.

    ========  =================================================================================================
    kind      how positions meet
    ========  =================================================================================================
    megatron  ``axis`` is also that of `tensor_slicing`: sliced layers gather the sequence before them and
              reduce-scatter it after them, in place of all-reduces (Korthikanti et al., arXiv 2205.05198)
    ulysses   all-to-all before attention, from parts of the sequence to shares of the heads, and back after
              it (arXiv 2309.14509)
    ring      keys and values travel around the ring of ranks, and no rank ever holds all of them (arXiv
              2310.01889); each rank has one chunk from either end of the sequence, so that causal work is even
    ========  =================================================================================================

    The model calls `shard_sequence` (or `embedding`), `attention` and `linear_cross_entropy`, which are plain PyTorch
    without this transform; dropout draws the whole sequence's mask. Every parameter that is not sliced over ``axis``
    is whole there and its gradient is summed. With "ulysses" and "ring" ``zero(stage, axis=axis)`` splits the training
    state over it too.

    Raises:
        IllegalComposition: an unknown kind; while planning, "megatron" without `tensor_slicing` over the axis, or
            with `zero` over it, the other kinds with it.
    """
    if kind not in KINDS:
        raise IllegalComposition(f"sequence(kind={kind!r}) is not one of {', '.join(map(repr, KINDS))}")
    return SequenceParallel(SequencePlan(axis, kind))
